//! The sandbox of the process that runs a guest, on real kernels with seccomp and Landlock.

use std::collections::BTreeMap;

use vmtrace::emulated::{FileSource, HostArch};
use vmtrace::sandbox::{EXIT_CODE, Thread};
use vmtrace_tests::trace::{WORKLOAD, host_lost, lost, lost_sign, options};
use vmtrace_tests::{SharedHost, cross, workload};

const HELPER: &str = "/bin/helper";

static X86_64: SharedHost = SharedHost::new(|| with_helper(HostArch::X86_64, "x86_64-6.12"));
static RISCV64: SharedHost = SharedHost::new(|| with_helper(HostArch::Riscv64, "riscv64-6.12"));

const BOTH: [(&SharedHost, &str); 2] = [(&X86_64, "x86_64-6.12"), (&RISCV64, "riscv64-6.12")];

fn with_helper(arch: HostArch, kernel: &str) -> anyhow::Result<vmtrace::emulated::HostOptions> {
    let helper = cross("host-helper", arch)?;
    let mut options = options(&workload(arch)?.to_string_lossy(), &[kernel])?;
    options.files.push((HELPER.to_owned(), FileSource::Path(helper)));
    Ok(options)
}

// The filters are what the kernel makes of them, and these are others for each architecture.
#[test]
fn forbidden_calls_end_the_process_and_others_do_not() {
    for (host, _) in BOTH {
        for thread in Thread::ALL {
            let attempt = |deed: &str| {
                let done = host.vmtrace(&["sandbox", thread.name(), deed], &[]).unwrap();
                (done.end.exit_code(), done.err())
            };
            let (code, said) = attempt("work");
            assert!(code == 0 && said.trim() == "done", "{thread:?}: {said}");
            for (deed, call) in [
                ("program", "(execve)"),
                ("process", "(clone)"),
                ("internet", "(socket)"),
                ("code", "(mmap)"),
                ("machine", "(ioctl)"),
            ] {
                let (code, said) = attempt(deed);
                assert_eq!(code, EXIT_CODE, "{thread:?} {deed}: {said}");
                assert!(said.contains(call) && said.contains(thread.name()), "{said}");
            }
            // No descriptor, no name: not the filter's word.
            let (code, said) = attempt("guest");
            let may = thread == Thread::Vcpu;
            assert_eq!(code, if may { 1 } else { EXIT_CODE }, "{thread:?}: {said}");
            let (code, said) = attempt("read");
            let why = match thread {
                // Landlock.
                Thread::Controller => "Permission denied",
                _ => "Function not implemented",
            };
            assert!(code == 1 && said.contains(why), "{thread:?}: {said}");
        }
    }
}

// A thread that nobody has confined would be the one that is taken.
#[test]
fn every_thread_of_a_run_is_confined() {
    for (host, kernel) in BOTH {
        let threads = loop {
            let image = format!("/k/{kernel}");
            let run = format!("{WORKLOAD} getppid 20000 0");
            let args = [
                "threads",
                "boot",
                &image,
                "--host",
                "kvm",
                "--cpus",
                "2",
                "--timeout",
                "240",
                "--graph",
                "-f",
                "*_sys_getppid",
                "--add",
                WORKLOAD,
                "--run",
                &run,
                "-o",
                "/dev/null",
                "--socket",
                "/tmp/socket",
            ];
            let done = match host.run(Some(HELPER), &args, &[], |_| {}) {
                Ok(done) => done,
                Err(error) if host_lost(&error) => {
                    lost(&error.to_string()).unwrap();
                    continue;
                }
                Err(error) => panic!("{error:#}"),
            };
            if let Some(sign) = lost_sign(&done.err()) {
                lost(sign).unwrap();
                continue;
            }
            assert_eq!(done.end.code, Some(0), "{}", done.err());
            break done.out();
        };
        let threads: BTreeMap<&str, Vec<&str>> = threads
            .lines()
            .filter_map(|line| line.split_once(' '))
            .map(|(name, rest)| (name, rest.split(' ').collect()))
            .collect();
        for name in ["vcpu0", "vcpu1", "relay", "events", "output", "console"] {
            assert!(threads.contains_key(name), "no {name} in {threads:?}");
        }
        // The controller is the seventh.
        assert!(threads.len() >= 7, "{threads:?}");
        for (name, confined) in &threads {
            let [seccomp, filters, no_new, capabilities] = confined[..] else {
                panic!("{name}: {confined:?}")
            };
            assert_eq!((seccomp, no_new), ("2", "1"), "{name}: {confined:?}");
            assert!(filters.parse::<u32>().unwrap() >= 2, "{name}: {confined:?}");
            // The host's programs run as root, with all there are.
            let kept = u64::from_str_radix(capabilities, 16).unwrap();
            let most = match *name {
                "events" => 1 << 1,
                "vcpu0" | "vcpu1" | "relay" | "output" | "console" => 0,
                _ => 1 << 1 | 1 << 23,
            };
            assert_eq!(kept & !most, 0, "{name}: {confined:?}");
        }
    }
}
