// Hovering or tapping a point of the map shows its image. Text goes in as text, never as HTML.
(function () {
  var map = document.getElementById('map'), tip = document.getElementById('tip');
  if (!map || !tip) return;
  var data = JSON.parse(document.getElementById('tips').textContent);
  function show(event) {
    var i = event.target.getAttribute && event.target.getAttribute('data-i');
    if (i === null || i === undefined || event.target.tagName !== 'circle') {
      tip.style.display = 'none';
      return;
    }
    tip.textContent = '';
    if (data.thumbnails[i]) {
      var img = document.createElement('img');
      img.src = data.thumbnails[i];
      img.alt = '';
      tip.appendChild(img);
    }
    data.lines[i].forEach(function (line) {
      var row = document.createElement('div');
      row.textContent = line;
      tip.appendChild(row);
    });
    tip.style.display = 'block';
    var x = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    var y = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8);
    tip.style.left = Math.max(4, x) + 'px'; tip.style.top = Math.max(4, y) + 'px';
  }
  map.addEventListener('pointerover', show);
  map.addEventListener('pointermove', show);
  map.addEventListener('click', show);
  map.addEventListener('pointerleave', function () { tip.style.display = 'none'; });
  document.getElementById('classes').addEventListener('click', function (event) {
    var button = event.target.closest('button');
    if (!button) return;
    var off = button.classList.toggle('off');
    button.setAttribute('aria-pressed', off);
    map.querySelectorAll('circle[data-c="' + button.getAttribute('data-c') + '"]').forEach(function (dot) {
      dot.style.display = off ? 'none' : '';
    });
  });
})();
