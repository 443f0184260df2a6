"""The reporter: a process between a tap and a daemon, ``python -m kvbm_console.reporter``.

``translator`` turns the tap's messages into stimuli. ``__main__`` submits the stimuli to the daemon's leader, and
returns verdicts on held requests to the tap.
"""
