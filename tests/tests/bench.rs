//! What the benchmark says to its user; no table is made for that.

use std::process::{Command, Output};

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmtrace-bench"));
    command.args(arguments).env("RUST_BACKTRACE", "1").output().unwrap()
}

// Who asks for the names of the tables would get a backtrace, or hours of tables.
#[test]
fn help_names_the_tables() {
    for arguments in [&["--help"][..], &["-h"], &["bytes", "--help"]] {
        let Output { status, stdout, stderr } = bench(arguments);
        assert_eq!((status.code(), &stderr[..]), (Some(0), &b""[..]));
        let help = String::from_utf8(stdout).unwrap();
        assert!(help.starts_with("usage: vmtrace-bench [TABLE]...\n"), "{help}");
        for table in ["bytes", "graph-boots", "patching-riscv64", "patching"] {
            let is_it = |word: &str| word.trim_end_matches('.') == table;
            assert!(help.split_whitespace().any(is_it), "{table}: {help}");
        }
    }
}

// A name that is wrong would be found out when the tables before it are done.
#[test]
fn an_unknown_table_is_one_line_before_any_other() {
    for arguments in [&["byte"][..], &["--byte"], &[""], &["bytes", "byte"]] {
        let Output { status, stdout, stderr } = bench(arguments);
        assert_eq!((status.code(), &stdout[..]), (Some(2), &b""[..]));
        let said = String::from_utf8(stderr).unwrap();
        assert!(said.starts_with("vmtrace-bench: unknown table \""), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}
