"""The command line: one module per command group, each imported only when it is used.

Law of this package: importing ``cli.main`` loads neither grpc nor textual; a command imports what it needs inside its
function. Machine output goes to stdout, messages to stderr; an error that a user can mend is one sentence and exit 2
or 3.
"""
