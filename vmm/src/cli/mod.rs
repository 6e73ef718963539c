//! Command line: a file per subcommand.
