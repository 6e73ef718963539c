//! Compiles the table to the filter that the kernel runs on every system call.
#![allow(unsafe_code, reason = "seccomp(2) has no wrapper that only asks")]

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};
use syscalls::Sysno;

use super::calls::{Calls, TERMINAL_REQUESTS, Test, of};
use super::{SandboxError, Thread};

#[cfg(target_arch = "x86_64")]
const ARCH: TargetArch = TargetArch::x86_64;
#[cfg(target_arch = "riscv64")]
const ARCH: TargetArch = TargetArch::riscv64;

/// Which argument of `ioctl` tells the request.
const REQUEST: u8 = 1;

/// Why this system has no filters, if it has none.
pub(super) fn missing() -> Option<io::Error> {
    let action = libc::SECCOMP_RET_TRAP;
    let get = libc::SECCOMP_GET_ACTION_AVAIL;
    // SAFETY: reads one integer that outlives the call.
    let failed = unsafe { libc::syscall(libc::SYS_seccomp, get, 0, &raw const action) } != 0;
    failed.then(io::Error::last_os_error)
}

/// The filters of every kind of thread: what is refused, and behind it what is allowed.
pub(super) struct Filters(Vec<(Thread, [BpfProgram; 2])>);

impl Filters {
    /// # Errors
    /// When one cannot be: a bug.
    pub(super) fn new(terminal: bool) -> Result<Self, SandboxError> {
        let filters = Thread::ALL.into_iter().map(|thread| {
            let mut calls = of(thread);
            if terminal {
                calls.requests.extend(TERMINAL_REQUESTS);
            }
            let both = programs(&calls);
            let error = |source| SandboxError::Filter { thread: thread.name(), source };
            Ok((thread, both.map_err(error)?))
        });
        Ok(Self(filters.collect::<Result<_, _>>()?))
    }

    /// For the calling thread, and all that it starts from now on.
    pub(super) fn install(&self, thread: Thread) -> Result<(), SandboxError> {
        let programs = self.0.iter().filter(|(whose, _)| *whose == thread);
        programs.flat_map(|(_, programs)| programs).try_for_each(install)
    }
}

/// For a process that serves a share: this thread, the only one.
pub(super) fn confine_share() -> Result<(), SandboxError> {
    super::last_words::install()?;
    let thread = "share";
    let programs = programs(&super::calls::of_share())
        .map_err(|source| SandboxError::Filter { thread, source })?;
    programs.iter().try_for_each(install)
}

fn install(program: &BpfProgram) -> Result<(), SandboxError> {
    seccompiler::apply_filter(program).map_err(|error| SandboxError::System {
        what: "install a seccomp filter",
        source: io::Error::other(error),
    })
}

fn programs(calls: &Calls) -> Result<[BpfProgram; 2], BackendError> {
    let refused = calls.refused.iter().map(|call| (number(*call), vec![])).collect();
    let errno = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    let refuse = SeccompFilter::new(refused, SeccompAction::Allow, errno, ARCH)?;
    let allow = SeccompFilter::new(rules(calls)?, SeccompAction::Trap, SeccompAction::Allow, ARCH)?;
    Ok([refuse.try_into()?, allow.try_into()?])
}

fn number(call: Sysno) -> i64 {
    i64::from(call.id())
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn rules(calls: &Calls) -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    for &(call, tests) in &calls.conditional {
        let conditions = tests.iter().map(|&(argument, test)| condition(argument, test));
        let rule = SeccompRule::new(conditions.collect::<Result<_, _>>()?)?;
        rules.entry(number(call)).or_default().push(rule);
    }
    for &request in &calls.requests {
        let rule = SeccompRule::new(vec![condition(REQUEST, Test::Is(request))?])?;
        rules.entry(number(Sysno::ioctl)).or_default().push(rule);
    }
    // Of what is refused as well: of two filters' answers the harsher one counts.
    for &call in calls.any.iter().chain(&calls.refused) {
        rules.insert(number(call), vec![]);
    }
    Ok(rules)
}

/// The kernel looks at 32 bits of all arguments that are tested here.
fn condition(argument: u8, test: Test) -> Result<SeccompCondition, BackendError> {
    let (operator, value) = match test {
        Test::Is(value) => (SeccompCmpOp::Eq, value),
        Test::IsNot(value) => (SeccompCmpOp::Ne, value),
        Test::Has(bits) => (SeccompCmpOp::MaskedEq(bits), bits),
        Test::HasNot(bits) => (SeccompCmpOp::MaskedEq(bits), 0),
        Test::IsMe => (SeccompCmpOp::Eq, u64::from(std::process::id())),
    };
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
}
