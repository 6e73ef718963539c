//! Tasks that are followed (`--children`): the named ones and all their descendants.
//!
//! Programs note each new task before it first runs, where its parent still is the current one; and a task that
//! was named by its name before it gets another, such as that of what it executes, or is named by the one that it
//! gets. A thread that executes a program, and is not the first one of its process, gets the process id of that one: it is
//! noted under that before. That is one function of the kernel each, whose sites are held whatever else is traced, in
//! pauses of tracing, too. So nothing that makes a task one of these is missed, and programs can note which tasks are not
//! ([`Strangers`](vmtrace_trampolines::family::Strangers)).

use super::conditions::{ConditionalError, conditional};
use super::ends::Use;
use super::tracing::{NOBODY, Tracing};
use crate::condition::{Condition, ConditionError, FOLLOWED};
use crate::kernel::{Arch, Kernel};
use crate::tracer::{Attachment, Part, Tally, TaskOffsets};
use vmtrace_trampolines::Condition as Compiled;
use vmtrace_trampolines::family::renamed;

/// What every new task comes by (kernel/sched/core.c): called by its parent, with the task.
const BEGINS: &str = "wake_up_new_task";
/// What a task comes by when it executes a program, or is renamed otherwise (fs/exec.c): called with the task and its
/// new name.
const RENAMES: &str = "__set_task_comm";
/// The argument of both with the task.
const TASK: Option<u8> = Some(0);
/// The one with the name.
const NEW_NAME: u8 = 1;
/// What a thread gets the process id of the first one of its process by, when it executes a program (kernel/pid.c, since
/// Linux 5.8): called with itself and that one, with interrupts off (but in a kernel for real time, where an interrupt in
/// the next few instructions may note it again until it gets its new name).
const EXCHANGES: &str = "exchange_tids";
/// The argument with the first one.
const LEADER: u8 = 1;
/// What calls those for a task that executes a program, one of each, as is verified: a compiler may put a function into its
/// caller (fs/exec.c).
const EXECUTES: [(&[&str], &str); 2] =
    [(&["begin_new_exec"], RENAMES), (&["begin_new_exec", "de_thread"], EXCHANGES)];

/// How tasks are followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Follow {
    /// Where tasks begin: an index into [`Kernel::sites`](crate::kernel::Kernel::sites).
    begins: usize,
    /// Where they get another name.
    renames: usize,
    /// Where they get another's process id, if the kernel has that.
    exchanges: Option<usize>,
    /// Where in a task its process id is.
    pid: u32,
    /// What holds of tasks whose children are followed.
    joins: Compiled,
    /// What holds of all others.
    leaves: Compiled,
    /// What holds of the name by which a task becomes a named one; `None` if not only its name makes it that: then
    /// every call of a task looks.
    renamed: Option<Compiled>,
    /// Whether programs are to be told who changes: x86-64 notes nobody.
    forgets: bool,
}

/// Why tasks cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum FollowError {
    /// The kernel does not say where they begin.
    #[error("tasks cannot be followed in this kernel: {0} has no site; leave out --children")]
    NoSite(&'static str),
    /// Nor where a process id is.
    #[error("{0}; leave out --children")]
    Tasks(String),
    /// There can be no such condition.
    #[error(transparent)]
    Condition(#[from] ConditionError),
    /// The same of this kernel.
    #[error(transparent)]
    Conditional(#[from] ConditionalError),
}

impl Follow {
    /// The descendants of tasks that `named` holds of, those tasks included: how, and the condition that holds
    /// of all of them.
    ///
    /// # Errors
    /// When that cannot be in this kernel, or the condition is about functions.
    pub fn new(kernel: &Kernel, named: &Condition) -> Result<(Self, Condition), FollowError> {
        let site = |name| kernel.site_of(name).ok_or(FollowError::NoSite(name));
        let (begins, renames) = (site(BEGINS)?, site(RENAMES)?);
        let tasks =
            TaskOffsets::find(kernel).map_err(|error| FollowError::Tasks(error.to_string()))?;
        let pid = u32::try_from(tasks.pid)
            .map_err(|_| FollowError::Tasks(format!("a task of {} bytes", tasks.pid)))?;
        let all: Condition = format!("({named}) || {FOLLOWED}").parse()?;
        let others: Condition = format!("!({all})").parse()?;
        let compiled = |condition: &Condition| {
            let (found, _) = conditional(kernel, &mut Vec::new(), Some(condition), Use::Entries)?;
            let general = found.and_then(|found| found.general().cloned());
            Ok::<_, ConditionalError>(general.unwrap_or(Compiled::Any(Vec::new())))
        };
        let (joins, leaves) = (compiled(&all)?, compiled(&others)?);
        let renamed = renamed(&compiled(named)?, NEW_NAME);
        let exchanges = kernel.site_of(EXCHANGES);
        let forgets = kernel.arch() == Arch::Riscv64 && renamed.is_some() && exchanges.is_some();
        Ok((Self { begins, renames, exchanges, pid, joins, leaves, renamed, forgets }, all))
    }

    /// What these sites have to do.
    pub(super) fn parts(&self) -> Vec<(usize, Vec<Part>)> {
        let part = |condition: Option<&Compiled>, counts| Part {
            tracer: NOBODY,
            condition: condition.cloned(),
            counts: Some(counts),
            ..Part::default()
        };
        let note = |condition: &Compiled, (argument, inside)| {
            part(Some(condition), Tally::Follow { argument, pid: self.pid, inside })
        };
        // Numbers of processes come again: who is not followed has to be taken out.
        let begins = vec![note(&self.joins, (TASK, true)), note(&self.leaves, (TASK, false))];
        let mut renames = vec![note(&self.joins, (None, true))];
        // The name is not there yet, so that it is noted that the task has it.
        if let Some(renamed) = &self.renamed
            && renamed.tests().next().is_some()
        {
            renames.push(note(renamed, (TASK, true)));
        }
        let mut all = vec![(self.begins, begins), (self.renames, renames)];
        if let Some(exchanges) = self.exchanges {
            all.push((exchanges, vec![note(&self.joins, (Some(LEADER), true))]));
        }
        if self.forgets {
            // Then all look again. Memory of a task comes again, too.
            all.iter_mut().for_each(|(_, parts)| parts.push(part(None, Tally::Forget)));
        }
        all
    }

    /// Lets programs note which tasks are not meant.
    pub fn note_strangers(&self, kernel: &Kernel, attachment: &mut Attachment) {
        if self.forgets {
            let sites = [self.begins, self.renames].into_iter().chain(self.exchanges).collect();
            attachment.note_strangers(kernel, &self.joins, sites, &EXECUTES);
        }
    }
}

impl Tracing {
    /// Whether a condition can be: those about tasks that are followed need some.
    ///
    /// # Errors
    /// Why not.
    pub fn check_followed(&self, condition: Option<&Condition>) -> Result<(), String> {
        match condition {
            Some(condition) if self.follow.is_none() && condition.is_about(|it| it == FOLLOWED) => {
                Err(format!(
                    "condition {:?}: no task is {FOLLOWED}: boot with --children, and with --pid or --comm",
                    condition.text()
                ))
            }
            _ => Ok(()),
        }
    }
}
