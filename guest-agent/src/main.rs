//! The `vmtrace-agent` binary; all of its code is in the library.

fn main() -> std::process::ExitCode {
    vmtrace_agent::main()
}
