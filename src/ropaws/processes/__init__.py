"""How the processes of a run share a machine and send to one another: what `ropaws.distributed` is made of."""
