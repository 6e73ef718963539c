//! Checks whether everything that an emulated host needs is installed, without starting one.

use super::arch::HostArch;
use super::cache::HostKernel;
use super::check::Check;
use super::program::program;
use super::qemu::Qemu;
use vmtrace_initramfs::{LoadedModule, Modules};

/// Looks at QEMU, kernel and modules. Details of what is missing say how to get it.
pub fn emulated_host_checks(arch: HostArch) -> Vec<Check> {
    let machine = arch.machine();
    let check = |name: &str, result: Result<String, String>| {
        let (ok, detail) = match result {
            Ok(detail) => (true, detail),
            Err(detail) => (false, detail),
        };
        Check { name: name.to_owned(), ok, detail }
    };
    let qemu = Qemu::find(machine).map_err(|e| e.to_string());
    let kernel = HostKernel::find(arch).map_err(|e| e.to_string());
    let accelerator = qemu.as_ref().map_err(Clone::clone).and_then(|qemu| match qemu.has_tcg() {
        true => Ok(format!("TCG, which emulates {}", machine.virtualization)),
        false => Err(format!(
            "{} is built without TCG; install {}",
            qemu.program.display(),
            machine.qemu_package
        )),
    });
    let modules = kernel.as_ref().map_err(Clone::clone).and_then(|kernel| {
        let modules =
            Modules::open(&kernel.modules).and_then(|modules| modules.resolve(machine.modules));
        let names = |loaded: Vec<_>| {
            let names: Vec<String> = loaded.into_iter().map(|m: LoadedModule| m.name).collect();
            names.join(", ")
        };
        modules
            .map(names)
            .map_err(|e| format!("{e}; run: vmtrace setup --refresh host-{}", machine.name))
    });
    let mut checks = vec![
        check(
            machine.qemu,
            qemu.as_ref().map(|qemu| format!("version {}", qemu.version)).map_err(Clone::clone),
        ),
        check(
            "host kernel",
            kernel
                .as_ref()
                .map(|k| format!("{} ({})", k.release, k.image.display()))
                .map_err(Clone::clone),
        ),
    ];
    if !arch.is_native() {
        let program = program(arch).map(|path| path.display().to_string());
        checks.push(check("its vmtrace", program.map_err(|e| e.to_string())));
    }
    // What depends on something that is missing is not worth a line of its own.
    if qemu.is_ok() {
        checks.insert(1, check("accelerator", accelerator));
    }
    if kernel.is_ok() {
        checks.insert(checks.len().min(3), check("its modules", modules));
    }
    checks
}
