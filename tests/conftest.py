"""For all tests: some send Ctrl-C or hang up, which what runs in the background or under nohup is told to ignore."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
