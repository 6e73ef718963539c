//! `vmtrace doctor`: what this machine can do, and how to get the rest.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

use anyhow::Result;

use super::exit;
use crate::host::probe::{self, Check};
use crate::host::{EmulatedHost, HostArch, HostOptions, Job, THIS_PROGRAM, emulated_host_checks};

/// Arguments of `vmtrace doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Also start the emulated host and look at the KVM in it
    #[arg(long)]
    boot: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Make the checks of KVM in this very process, a line of JSON each
    #[arg(long, hide = true)]
    kvm_probe_worker: bool,
}

/// Looks at everything; fails if there is nothing to run guests on.
///
/// # Errors
/// When the results cannot be written.
pub fn run(args: &Args) -> Result<u8> {
    let mut out = std::io::stdout().lock();
    if args.kvm_probe_worker {
        probe::worker(out);
        return Ok(exit::DONE);
    }
    let kvm = probe::probe(Path::new(THIS_PROGRAM));
    let mut emulated = emulated_host_checks(HostArch::native());
    if args.boot && usable(&emulated) {
        emulated.push(boot());
    }
    if args.json {
        let json = serde_json::json!({
            "kvm": { "usable": kvm.usable, "checks": kvm.checks },
            "emulated_host": { "usable": usable(&emulated), "checks": emulated },
        });
        writeln!(out, "{json:#}")?;
    } else {
        out.write_all(report(kvm.usable, &kvm.checks, &emulated).as_bytes())?;
    }
    Ok(if kvm.usable || usable(&emulated) { exit::DONE } else { exit::FAILED })
}

fn usable(checks: &[Check]) -> bool {
    checks.iter().all(|check| check.ok)
}

fn report(kvm_usable: bool, kvm: &[Check], emulated: &[Check]) -> String {
    let mut text = String::new();
    let mut section = |title: &str, usable: bool, checks: &[Check]| {
        let _ = writeln!(text, "{title}: {}", if usable { "usable" } else { "not usable" });
        for check in checks {
            let _ = writeln!(text, "  {}  {check}", if check.ok { "ok  " } else { "FAIL" });
        }
    };
    section("KVM on this machine", kvm_usable, kvm);
    section("Emulated host", usable(emulated), emulated);
    text.push_str(match (kvm_usable, usable(emulated)) {
        (true, _) => "Guests run on this machine's KVM.\n",
        (false, true) => {
            "Guests run in an emulated host, much slower than on KVM. For KVM: a machine with VT-x or AMD-V, bare or with\n\
             nested virtualisation, with the module kvm_intel or kvm_amd loaded and /dev/kvm accessible.\n"
        }
        (false, false) => {
            "Guests cannot run here. scripts/setup installs what the emulated host needs; with a usable KVM it is not\n\
             needed.\n"
        }
    });
    text
}

fn boot() -> Check {
    let check = |ok, detail| Check { name: "start".to_owned(), ok, detail };
    let options = HostOptions { progress: true, ..HostOptions::default() };
    let mut host = match EmulatedHost::start(&options) {
        Ok(host) => host,
        Err(e) => return check(false, e.to_string()),
    };
    let time = host.start_time().as_secs_f64();
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let end = host.run(Job::new(["doctor", "--json"], &mut stdout, &mut stderr));
    let inner: serde_json::Value = serde_json::from_slice(&stdout).unwrap_or_default();
    match end {
        Err(e) => check(false, e.to_string()),
        Ok(_) if inner["kvm"]["usable"] == true => {
            check(true, format!("{time:.1} s, and the KVM in it is usable"))
        }
        Ok(_) => check(false, format!("the KVM in it is not usable: {}", inner["kvm"]["checks"])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_names_what_failed() {
        let check = |ok| Check { name: "thing".to_owned(), ok, detail: "because".to_owned() };
        let text = report(false, &[check(true), check(false)], &[check(true)]);
        assert!(text.starts_with(
            "KVM on this machine: not usable\n  ok    thing: because\n  FAIL  thing: because\n"
        ));
        assert!(text.contains("Emulated host: usable"), "{text}");
        assert!(report(false, &[], &[check(false)]).contains("scripts/setup"));
    }
}
