//! Limits the files that can be opened by name, by Landlock (Linux 5.13).

use std::io;
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, Errno, PathBeneath,
    PathFd, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus,
    Scope,
};

use super::{SandboxError, Settings};

/// The newest kind of Landlock that was tried; an older kernel does what it can.
const NEWEST: ABI = ABI::V7;

/// The one set of rules for all threads: files that are open stay open, and nothing is opened but
/// what `settings` names. `None`: there is no Landlock.
pub(super) fn ruleset(settings: &Settings) -> Result<Option<RulesetCreated>, SandboxError> {
    rules(|rules| {
        for directory in &settings.cleared {
            add(rules, directory, AccessFs::RemoveFile.into())?;
        }
        let write = AccessFs::WriteFile | AccessFs::Truncate;
        for file in &settings.written {
            if file.exists() {
                add(rules, file, write)?;
            } else if let Some(directory) = file.parent() {
                add(rules, directory, write | AccessFs::MakeReg)?;
            }
        }
        Ok(())
    })
}

/// This thread reaches nothing but this directory and what is in it. No devices are made there.
pub(super) fn restrict_to(directory: &Path, writable: bool) -> Result<(), SandboxError> {
    let reads = AccessFs::ReadFile | AccessFs::ReadDir;
    let devices = AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::IoctlDev | AccessFs::Execute;
    let all = if writable { AccessFs::from_all(NEWEST) & !devices } else { reads };
    let rules = rules(|rules| add(rules, directory, all))?;
    rules.as_ref().map_or(Ok(()), restrict)
}

/// Rules by which nothing is reached but what is allowed here. `None`: there is no Landlock.
fn rules(
    allow: impl FnOnce(&mut RulesetCreated) -> Result<(), RulesetError>,
) -> Result<Option<RulesetCreated>, SandboxError> {
    let made = || -> Result<_, RulesetError> {
        let mut rules = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(NEWEST))?
            .handle_access(AccessNet::from_all(NEWEST))?
            // Not signals: threads enter one by one, and the controller kicks vCPUs.
            .scope(Scope::AbstractUnixSocket)?
            .create()?;
        allow(&mut rules)?;
        Ok(rules)
    };
    let rules = made().map_err(error("make rules for files (Landlock)"))?;
    // Without Landlock there is no descriptor behind it.
    let clone = rules.try_clone().map_err(SandboxError::system("copy a descriptor"))?;
    Ok(Option::<std::os::fd::OwnedFd>::from(clone).is_some().then_some(rules))
}

fn add(
    rules: &mut RulesetCreated,
    path: &Path,
    access: BitFlags<AccessFs>,
) -> Result<(), RulesetError> {
    // What is not there cannot be opened, whatever the rules say.
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let Ok(descriptor) = PathFd::new(path) else { return Ok(()) };
    match rules.add_rule(PathBeneath::new(descriptor, access)) {
        // A pipe or a socket, as /dev/stdout may be: Landlock has no rules for them, and lets them
        // be opened (landlock_add_rule(2), EBADFD).
        Err(error) if *Errno::from(&error) == libc::EBADFD => Ok(()),
        added => added.map(|_| ()),
    }
}

/// The calling thread, and all that it starts, obey these from now on.
pub(super) fn restrict(rules: &RulesetCreated) -> Result<(), SandboxError> {
    let rules = rules.try_clone().map_err(SandboxError::system("copy a descriptor"))?;
    let status = rules.restrict_self().map_err(error("apply rules for files (Landlock)"))?;
    if status.ruleset == RulesetStatus::NotEnforced {
        let nothing = io::Error::other("the kernel has accepted none of them");
        return Err(SandboxError::system("apply rules for files (Landlock)")(nothing));
    }
    Ok(())
}

fn error(what: &'static str) -> impl Fn(RulesetError) -> SandboxError {
    move |error| SandboxError::System { what, source: io::Error::other(error) }
}
