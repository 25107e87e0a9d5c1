"""For all tests: a shell's background processes ignore Ctrl-C unless told otherwise, and some tests send it."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
