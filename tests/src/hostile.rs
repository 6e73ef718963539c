//! Guests that write into the annex.

use vmtrace::stream::Exit;

use crate::cases::{Guests, value};
use crate::trace::{WORKLOAD, boot, boot_once, host_lost, lost, syscall};

/// How much is written, so that every megabyte of the annex is met.
const WORDS: u32 = 200_000;
/// How often the workload `laps` calls `getppid` before it does harm.
const LAPS_CALLS: usize = 500;

impl Guests {
    /// A ring that programs cannot have left so ends tracing at once, and the guest lives.
    pub fn a_damaged_ring_ends_tracing_and_not_the_guest(&self, name: &str) {
        let run = format!("{WORKLOAD} laps");
        let getppid = syscall(name, "getppid").unwrap();
        let args = ["-f", &getppid, "--cpus", "2", "--add", WORKLOAD, "--run", &run];
        let (finished, trace) = boot(&self.host, name, &args).unwrap();
        let err = finished.err();
        assert!(err.contains("\nalive"), "{name}: {err}");
        // Of both vCPUs: the ring of one that was left alone goes on.
        assert!(value(&finished, "scribbled ") >= 2, "{name}: {err}");
        assert_eq!(trace.summary.exit, Exit::Poweroff, "{name}: {err}");
        assert_eq!(finished.end.code, Some(1), "{name}: {err}");
        let what = "was overwritten by the guest";
        assert!(err.contains("error: tracing has ended before the guest"), "{name}: {err}");
        assert!(err.contains(what), "{name}: {err}");
        let noted = trace.summary.notes.iter().any(|note| note.contains(what));
        assert!(noted, "{name}: {:?}", trace.summary.notes);
        // What the relay had read by then is there, and nothing of what came afterwards. How much
        // that is depends on when it came by.
        let pid = value(&finished, "pid ");
        let calls = trace.entries.iter().filter(|it| it.pid == pid).count();
        assert!((1..=LAPS_CALLS).contains(&calls), "{name}: {calls} calls; {err}");
    }

    /// Whatever a guest writes there, vmtrace ends with the guest, and its stream is whole.
    /// `VMTRACE_HOSTILE_SEEDS=4,5,6` says what to write instead: by hand, for hours.
    pub fn a_guest_may_write_anything_into_the_annex(&self, name: &str, seeds: &[u64]) {
        let getppid = syscall(name, "getppid").unwrap();
        let seeds = match std::env::var("VMTRACE_HOSTILE_SEEDS") {
            Ok(text) => text.split(',').map(|seed| seed.parse().unwrap()).collect(),
            Err(_) => seeds.to_vec(),
        };
        for seed in seeds {
            let run = format!("{WORKLOAD} anywhere {seed} {WORDS}");
            let args = ["-f", &getppid, "-f", "vfs_*", "--graph", "--cpus", "2", "--add", WORKLOAD];
            let (finished, trace) = loop {
                let args = [&args[..], &["--run", &run, "--timeout", "45"]].concat();
                match boot_once(&self.host, name, &args) {
                    Ok(ended) if ended.0.err().contains("\nscribbling") => break ended,
                    // Before it has done anything.
                    Ok((finished, _)) => lost(&finished.err()).unwrap(),
                    Err(error) if host_lost(&error) => lost(&error.to_string()).unwrap(),
                    Err(error) => panic!("{name}, seed {seed}: {error:#}"),
                }
            };
            let err = finished.err();
            // 1: tracing has ended early; 3: the guest has died; 4: its kernel has killed the command; 124: it hangs.
            let codes = [0, 1, 3, 4, 124].map(Some);
            let code = finished.end.code;
            assert!(codes.contains(&code), "{name}, seed {seed}: exit code {code:?}: {err}");
            assert!(!err.contains("panicked at"), "{name}, seed {seed}: {err}");
            eprintln!(
                "{name}, seed {seed}: {:?}, {:?}; {:?}",
                finished.end.code, trace.summary.exit, trace.summary.notes
            );
        }
    }
}
