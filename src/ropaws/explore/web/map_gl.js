/**
 * The map's points drawn by the graphics card, where there is one: positions and colors stay there, so that a
 * frame of a million points is a few numbers. Without one, map_canvas.js writes pixels.
 *
 * @import { Columns } from "./columns.js"
 * @import { Size, View } from "./geometry.js"
 * @typedef {{which: Uint32Array | null, diameter: number, paint: string | null}} Layer
 *   - the points, all if null; their diameter in pixels; one color (#rrggbb), or their own
 */
import { channels } from "./colors.js";

const VERTEX = `#version 300 es
in float x; in float y; in vec4 color;
uniform vec2 center; uniform vec2 scale; uniform float size; uniform vec4 paint;
out vec4 shade;
void main() {
  gl_Position = vec4((vec2(x, y) - center) * scale, color.a > 0.0 ? 0.0 : 2.0, 1.0);
  gl_PointSize = size;
  shade = paint.a > 0.0 ? paint : color;
}`;
const FRAGMENT = `#version 300 es
precision highp float;
in vec4 shade;
uniform float size;
out vec4 pixel;
void main() {
  vec2 off = gl_PointCoord - 0.5;
  if (size > 2.0 && dot(off, off) > 0.25) discard;
  pixel = shade;
}`;
const UNIFORMS = ["center", "scale", "size", "paint"];

/** Not all browsers say by the option above that the processor computes. @param {WebGL2RenderingContext} gl */
function hasCard(gl) {
  const named = gl.getExtension("WEBGL_debug_renderer_info");
  const name = String(gl.getParameter(named ? named.UNMASKED_RENDERER_WEBGL : gl.RENDERER));
  return !/swiftshader|llvmpipe|softpipe|software|basic render/i.test(name);
}

/** The program of both shaders; null if the card does not take it. @param {WebGL2RenderingContext} gl */
function linked(gl) {
  const program = gl.createProgram();
  if (!program) return null;
  const sources = /** @type {const} */ ([
    [gl.VERTEX_SHADER, VERTEX],
    [gl.FRAGMENT_SHADER, FRAGMENT],
  ]);
  for (const [kind, source] of sources) {
    const shader = gl.createShader(kind);
    if (!shader) return null;
    gl.shaderSource(shader, source);
    gl.compileShader(shader);
    gl.attachShader(program, shader);
  }
  gl.linkProgram(program);
  return gl.getProgramParameter(program, gl.LINK_STATUS) ? program : null;
}

export class GlPoints {
  /**
   * Null where there is no WebGL2, or only one that computes without a card: pixels are faster then.
   *
   * @param {HTMLCanvasElement} canvas @param {boolean} slowToo - for measuring
   * @returns {GlPoints | null}
   */
  static open(canvas, slowToo = false) {
    const gl = canvas.getContext("webgl2", {
      antialias: false,
      depth: false,
      failIfMajorPerformanceCaveat: !slowToo,
    });
    const program = gl && (slowToo || hasCard(gl)) && linked(gl);
    return gl && program ? new GlPoints(gl, program) : null;
  }

  /** @param {WebGL2RenderingContext} gl @param {WebGLProgram} program */
  constructor(gl, program) {
    this.gl = gl;
    gl.useProgram(program);
    this.program = program;
    /** @type {Record<string, WebGLUniformLocation | null>} */
    this.at = Object.fromEntries(UNIFORMS.map((name) => [name, gl.getUniformLocation(program, name)]));
    /** @type {Map<string, {buffer: WebGLBuffer | null, holds: unknown}>} - what the card has */
    this.buffers = new Map();
  }

  /**
   * @param {Size} size - in pixels @param {View} view @param {Columns} columns @param {Uint32Array} colors
   * @param {Layer[]} layers - the last is on top
   */
  draw(size, view, columns, colors, layers) {
    const { gl, at } = this;
    gl.viewport(0, 0, size.width, size.height);
    gl.clear(gl.COLOR_BUFFER_BIT);
    this.attribute("x", columns.x, 1, gl.FLOAT);
    this.attribute("y", columns.y, 1, gl.FLOAT);
    this.attribute("color", colors, 4, gl.UNSIGNED_BYTE);
    gl.uniform2f(at.center, view.x, view.y);
    gl.uniform2f(at.scale, (2 * view.scale) / size.width, (-2 * view.scale) / size.height);
    for (const [number, { which, diameter, paint }] of layers.entries()) {
      gl.uniform1f(at.size, diameter);
      const [r, g, b] = paint ? channels(paint) : [0, 0, 0];
      gl.uniform4f(at.paint, r / 255, g / 255, b / 255, paint ? 1 : 0);
      if (which) {
        this.upload(`layer ${number}`, gl.ELEMENT_ARRAY_BUFFER, which);
        gl.drawElements(gl.POINTS, which.length, gl.UNSIGNED_INT, 0);
      } else {
        gl.drawArrays(gl.POINTS, 0, columns.n);
      }
    }
  }

  /** @param {string} name @param {ArrayBufferView} values @param {number} parts @param {number} kind */
  attribute(name, values, parts, kind) {
    const { gl } = this;
    this.upload(name, gl.ARRAY_BUFFER, values);
    const place = gl.getAttribLocation(this.program, name);
    gl.enableVertexAttribArray(place);
    gl.vertexAttribPointer(place, parts, kind, kind === gl.UNSIGNED_BYTE, 0, 0);
  }

  /** Binds a buffer; what it holds already is not sent again. @param {string} name @param {number} target @param {ArrayBufferView} values */
  upload(name, target, values) {
    const { gl } = this;
    const known = this.buffers.get(name) ?? { buffer: gl.createBuffer(), holds: null };
    this.buffers.set(name, known);
    gl.bindBuffer(target, known.buffer);
    if (known.holds === values) return;
    gl.bufferData(target, /** @type {any} */ (values), gl.DYNAMIC_DRAW);
    known.holds = values;
  }
}
