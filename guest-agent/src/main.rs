//! The `vmtrace-agent` binary: everything is in the library.

fn main() -> std::process::ExitCode {
    vmtrace_agent::main()
}
