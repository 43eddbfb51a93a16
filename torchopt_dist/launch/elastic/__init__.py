"""Hosts that come and go → the values of the last world that they formed.

On the launcher: ``launch.py`` takes what is known of the hosts (``members.py``), each of which has a job
(``host_job.py``) in a thread. ``verdict.py`` says of a failure whether it is a restart, the end, or follows from a
host's loss. The store of torch's rendezvous is there too (``store.py``), so that it is not lost with a host.

On each host: ``host.py`` is torch's elastic agent, ``rendezvous.py`` its way into a world, ``worker.py`` what it
starts, ``watch.py`` what looks after these, and ``output.py`` how the launcher hears of all that. What both sides tell
each other is in ``records.py``.
"""

from torchopt_dist.launch.elastic.launch import run_elastic
from torchopt_dist.launch.elastic.reach import reach_some

__all__ = ["reach_some", "run_elastic"]
