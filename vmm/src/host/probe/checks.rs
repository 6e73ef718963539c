//! The checks that all architectures share; the code that the virtual machine executes is
//! per-architecture.
#![allow(unsafe_code)]

use std::io::{self, Write};
use std::time::Instant;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::{Failed, Reporter, native};

/// What a virtual machine tells us.
pub(super) enum Step {
    /// It begins this one of the architecture's steps, or has ended the last.
    Reached(usize),
    /// What a step computed is wrong.
    Wrong,
    /// The loop at the end is over.
    Done,
}

/// All checks, in the order in which they make sense.
pub(super) fn all<W: Write>(report: &mut Reporter<W>) -> Result<(), Failed> {
    let kvm = report.check("/dev/kvm", open)?;
    report.check("capabilities", || capabilities(&kvm))?;
    let range = (GuestAddress(native::BASE), native::MEMORY);
    let memory = GuestMemoryMmap::<()>::from_ranges(&[range]);
    let (vm, mut vcpu) = report.check("a virtual machine", || {
        let memory = memory.as_ref().map_err(ToString::to_string)?;
        native::machine(&kvm, memory)
    })?;
    native::devices(report, &kvm, &vcpu)?;
    report.check("immediate exit", || immediate_exit(&mut vcpu))?;
    let mut reached = None;
    for (n, name) in native::STEPS.iter().enumerate() {
        report.check(name, || {
            while reached.is_none_or(|step| step <= n) {
                match native::step(&mut vcpu)? {
                    Step::Reached(step) => reached = Some(step),
                    Step::Wrong => return Err("wrong result".to_owned()),
                    Step::Done => return Err("ended early".to_owned()),
                }
            }
            Ok(((), "works".to_owned()))
        })?;
    }
    report.check("speed of a kernel", || {
        let begin = Instant::now();
        match native::step(&mut vcpu)? {
            Step::Done => {
                let rate = f64::from(2 * native::LOOPS) / begin.elapsed().as_secs_f64() / 1e6;
                Ok(((), format!("{rate:.0} million instructions/s")))
            }
            _ => Err("did not end".to_owned()),
        }
    })?;
    drop(vm);
    Ok(())
}

fn open() -> Result<(Kvm, String), String> {
    let kvm = Kvm::new().map_err(|e| match e.errno() {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => "there is none".to_owned(),
        libc::EACCES | libc::EPERM => {
            "no permission to open it (is this user in the group kvm?)".to_owned()
        }
        code => io::Error::from_raw_os_error(code).to_string(),
    })?;
    match kvm.get_api_version() {
        12 => Ok((kvm, "KVM API 12".to_owned())),
        other => Err(format!("KVM API {other}, 12 is needed")),
    }
}

fn capabilities(kvm: &Kvm) -> Result<((), String), String> {
    let missing: Vec<_> = native::NEEDED
        .iter()
        .filter(|(cap, _)| !kvm.check_extension(*cap))
        .map(|(_, name)| *name)
        .collect();
    if missing.is_empty() {
        Ok(((), "all that are needed".to_owned()))
    } else {
        Err(format!("no {}", missing.join(", ")))
    }
}

/// Lets the virtual machine have its memory, at [`native::BASE`].
pub(super) fn give_memory(vm: &VmFd, memory: &GuestMemoryMmap<()>) -> Result<(), String> {
    let base = GuestAddress(native::BASE);
    let host = memory.get_host_address(base).map_err(|e| e.to_string())?;
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: base.0,
        memory_size: native::MEMORY as u64,
        userspace_addr: host as u64,
    };
    // SAFETY: the range is the whole of `memory`, which the caller keeps longer than the virtual machine, and
    // which is only accessed as guest memory.
    unsafe { vm.set_user_memory_region(region) }.map_err(|e| format!("cannot give it memory: {e}"))
}

fn immediate_exit(vcpu: &mut VcpuFd) -> Result<((), String), String> {
    vcpu.set_kvm_immediate_exit(1);
    let result = match vcpu.run() {
        Err(e) if e.errno() == libc::EINTR => Ok(((), "works".to_owned())),
        Err(e) => Err(e.to_string()),
        Ok(exit) => Err(format!("it ran instead ({exit:?})")),
    };
    vcpu.set_kvm_immediate_exit(0);
    result
}
