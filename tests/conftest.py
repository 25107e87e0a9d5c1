"""For all tests: some send Ctrl-C or hang up, which processes started in the background or by nohup are told to ignore."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
