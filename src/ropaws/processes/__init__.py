"""How the processes of a run share a machine and talk to one another: parts of `ropaws.distributed`."""
