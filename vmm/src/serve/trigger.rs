//! Parses triggers: `GLOB[,GLOB...][:N][ if CONDITION]`, with N for the N-th call, followed by ` -- COMMAND` for
//! triggers that run one.

use super::spec::{Actions, IF, MODULE, SpecError, TracerSpec, write_globs};
use crate::condition::Condition;
use std::fmt;
use std::str::FromStr;

/// The last call that can be asked for: what counts down to it goes on below 0.
const MOST: u64 = i64::MAX.cast_unsigned();

/// What is done at a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TriggerAction {
    /// Tracing begins, or goes on.
    Start,
    /// Tracing pauses.
    Stop,
    /// What a flight recorder has is written into the stream.
    Snapshot,
    /// A mark is put into the trace.
    Mark,
    /// The run ends.
    End,
    /// A command is run beside the VMM. Only at boot: who runs commands is started before the sandbox, and
    /// knows them from then on.
    Command,
}

impl TriggerAction {
    /// All that can be asked for while a guest runs.
    const LIVE: [Self; 5] = [Self::Start, Self::Stop, Self::Snapshot, Self::Mark, Self::End];

    /// The option that asks for it at boot.
    #[must_use]
    pub fn option(self) -> &'static str {
        match self {
            Self::Start => "--start-at",
            Self::Stop => "--stop-at",
            Self::Snapshot => "--snapshot-at",
            Self::Mark => "--mark-at",
            Self::End => "--end-at",
            Self::Command => "--exec-at",
        }
    }

    /// The word for it: that of the option.
    #[must_use]
    pub fn word(self) -> &'static str {
        self.option().trim_start_matches("--").trim_end_matches("-at")
    }
}

impl fmt::Display for TriggerAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// One that can be asked for while a guest runs.
impl FromStr for TriggerAction {
    type Err = TriggerError;

    fn from_str(text: &str) -> Result<Self, TriggerError> {
        if text == Self::Command.word() {
            return Err(TriggerError::Exec);
        }
        let found = Self::LIVE.into_iter().find(|action| action.word() == text);
        found.ok_or_else(|| TriggerError::Action(text.to_owned()))
    }
}

/// Calls of functions, and which of them is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TriggerSpec {
    /// Functions.
    pub filter: Vec<String>,
    /// Exceptions: globs with `!` before them.
    pub notrace: Vec<String>,
    /// Of which calls; `None` for all.
    pub condition: Option<Condition>,
    /// Which of these calls, of all functions and vCPUs together: from 1 on.
    pub call: u64,
}

/// Why a text is no trigger.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TriggerError {
    /// Functions or conditions.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// What tracers have and triggers have not.
    #[error("{0:?} is not a trigger: use GLOB[,GLOB...][:N][ if CONDITION], N for the N-th call")]
    NoTrigger(String),
    /// Between the colon and the condition.
    #[error("{0:?} is not the number of a call: use 1 for the first, and {MOST} at most")]
    Call(String),
    /// Not what a running trace can do at a call.
    #[error("{0:?} is not what a trigger does: use start, stop, snapshot, mark or end")]
    Action(String),
    /// Nobody can be started who runs it.
    #[error(
        "commands are given at boot (boot --exec-at): a run that has begun cannot start programs; \
         a trigger that marks the trace is seen by who reads its stream"
    )]
    Exec,
}

impl FromStr for TriggerSpec {
    type Err = TriggerError;

    fn from_str(text: &str) -> Result<Self, TriggerError> {
        let (globs, condition) = match text.split_once(IF) {
            Some((globs, condition)) => (globs.trim_end(), Some(condition)),
            None => (text, None),
        };
        // The last module's name has no colon.
        let names = globs.rfind(MODULE).map_or(0, |at| at + MODULE.len());
        let (globs, call) = match globs.rfind(':').filter(|&colon| colon >= names) {
            None => (globs, 1),
            Some(colon) => {
                let (globs, call) = globs.split_at(colon);
                let call = call.trim_start_matches(':');
                let number = call.parse().ok().filter(|call| (1..=MOST).contains(call));
                (globs, number.ok_or_else(|| TriggerError::Call(call.to_owned()))?)
            }
        };
        let condition = condition.map_or_else(String::new, |text| format!("{IF}{text}"));
        let spec: TracerSpec = format!("{globs}{condition}").parse()?;
        if spec.name.is_some() || spec.actions != Actions::default() || spec.filter.is_empty() {
            return Err(TriggerError::NoTrigger(text.to_owned()));
        }
        let TracerSpec { filter, notrace, condition, .. } = spec;
        Ok(Self { filter, notrace, condition, call })
    }
}

impl fmt::Display for TriggerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_globs(f, &self.filter, &self.notrace)?;
        if self.call != 1 {
            write!(f, ":{}", self.call)?;
        }
        match &self.condition {
            Some(condition) => write!(f, "{IF}{condition}"),
            None => Ok(()),
        }
    }
}

/// What ends the calls and begins the command. No glob, number or operand has it.
const COMMAND: &str = " -- ";

/// Calls of functions, and a command of the shell for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandSpec {
    /// The calls.
    pub at: TriggerSpec,
    /// For `sh -c`.
    pub command: String,
}

/// Why a text is no trigger with a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// Of the calls.
    #[error(transparent)]
    At(#[from] TriggerError),
    /// Nothing to run.
    #[error("{0:?} has no command: use GLOB[,GLOB...][:N][ if CONDITION] -- COMMAND")]
    NoCommand(String),
    /// No argument of a program can have one.
    #[error("the command has a NUL byte")]
    Nul,
}

impl FromStr for CommandSpec {
    type Err = CommandError;

    fn from_str(text: &str) -> Result<Self, CommandError> {
        let none = || CommandError::NoCommand(text.to_owned());
        let (at, command) = text.split_once(COMMAND).ok_or_else(none)?;
        let command = command.trim();
        if command.is_empty() {
            return Err(none());
        }
        if command.contains('\0') {
            return Err(CommandError::Nul);
        }
        Ok(Self { at: at.parse()?, command: command.to_owned() })
    }
}

impl fmt::Display for CommandSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{COMMAND}{}", self.at, self.command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // An emulated host gets triggers as text again.
    #[test]
    fn triggers_survive_being_text() {
        for text in
            ["vfs_read", "vfs_*,!vfs_read:3", "a if pid == 1", "a,b:17 if comm == \"x:2 if\""]
        {
            assert_eq!(text.parse::<TriggerSpec>().unwrap().to_string(), text);
        }
        // The number of a call is no module's, and a module's name no number.
        for (text, filter, call) in [
            (":mod:ext4", &[":mod:ext4"][..], 1),
            ("a:mod:ext4:7", &["a:mod:ext4"], 7),
            ("a:mod:ext4,b:7 if pid == 1", &["a:mod:ext4", "b"], 7),
            ("b,ext4_*:mod:ext4 if comm == \":mod:x\"", &["b", "ext4_*:mod:ext4"], 1),
        ] {
            let spec: TriggerSpec = text.parse().unwrap();
            assert_eq!((&*spec.to_string(), spec.call), (text, call));
            assert_eq!(spec.filter, filter, "{text}");
        }
        let spec: TriggerSpec = "a,b:1 if cpu == 0".parse().unwrap();
        assert_eq!((spec.call, spec.filter.len(), spec.condition.is_some()), (1, 2, true));
    }

    #[test]
    fn commands_are_behind_the_calls() {
        for text in ["panic -- ./collect", "a,!b:3 if pid == 1 -- echo \"$X\" -- if >f; exit 3"] {
            assert_eq!(text.parse::<CommandSpec>().unwrap().to_string(), text);
        }
        let spec: CommandSpec = "a if cpu == 0 --   b -- c ".parse().unwrap();
        assert_eq!((spec.at.condition.is_some(), &*spec.command), (true, "b -- c"));
        for bad in
            ["a", "a --", "a -- ", "a -- \t", "-- b", " -- b", "a:0 -- b", "a --b", "a -- b\0c"]
        {
            assert!(bad.parse::<CommandSpec>().is_err(), "{bad:?}");
        }
    }

    // A run that is under way must never be given a command: its sandbox is there to keep it from running any.
    #[test]
    fn actions_are_the_words_of_the_options_and_commands_are_for_boots() {
        for action in TriggerAction::LIVE {
            assert_eq!(action.word().parse(), Ok(action));
            assert_eq!(format!("--{action}-at"), action.option());
        }
        assert_eq!("exec".parse::<TriggerAction>(), Err(TriggerError::Exec));
        for bad in ["", "Start", "start-at", "--start-at", "resume", "command"] {
            let error = bad.parse::<TriggerAction>().unwrap_err();
            assert_eq!(error, TriggerError::Action(bad.to_owned()));
        }
    }

    #[test]
    fn what_is_no_trigger_is_refused() {
        for bad in [
            "",
            "a:",
            "a:0",
            "a:9223372036854775808",
            "a:-1",
            "a:graph",
            "n=a",
            "!a",
            "a:2:3",
            "a if",
            "a,",
            "a:mod:ext4:0",
            "a:mod:ext4:",
            "a:mod:ext4:1:2",
            "a:2:mod:ext4:graph",
            "a b",
        ] {
            assert!(bad.parse::<TriggerSpec>().is_err(), "{bad:?}");
        }
    }
}
