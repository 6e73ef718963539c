//! Command line: a file per subcommand.

pub mod report;
