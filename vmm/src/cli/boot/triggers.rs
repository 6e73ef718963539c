//! Options for actions at calls.

use super::headings;
use crate::kernel::Kernel;
use crate::serve::{CommandError, CommandSpec, TriggerAction as Action, TriggerError, TriggerSpec};
use crate::session::{Spot, SpotError, Tracing, Trigger};
use anyhow::{Result, anyhow, bail};
use vmtrace_trampolines::Overflow;

fn trigger(text: &str) -> Result<TriggerSpec, String> {
    text.parse().map_err(|error: TriggerError| error.to_string())
}

fn command(text: &str) -> Result<CommandSpec, String> {
    text.parse().map_err(|error: CommandError| error.to_string())
}

const SPEC: &str = "GLOB[,GLOB...][:N][ if CONDITION]";
const COMMAND_SPEC: &str = "GLOB[,GLOB...][:N][ if CONDITION] -- COMMAND";

/// Actions at calls, each done once.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Triggers {
    /// Begin to record at a call of these functions: at the N-th, or the first, of all their calls for
    /// which the condition (see --if) holds. That call is recorded. The guest counts the calls itself
    /// and stops only at that one; may be repeated. It also ends a pause by --stop-at or `ctl pause`.
    /// GLOB:mod:NAME waits for a module, and counts on whenever that is loaded again. With a condition on
    /// retval or duration it is at the end of the call, from where what comes next is recorded
    #[arg(long, value_name = SPEC, value_parser = trigger, help_heading = headings::TRACE)]
    pub start_at: Vec<TriggerSpec>,
    /// Stop recording after such a call, which is still recorded if its function is traced; may be
    /// repeated
    #[arg(long, value_name = SPEC, value_parser = trigger, help_heading = headings::TRACE)]
    pub stop_at: Vec<TriggerSpec>,
    /// At such a call write the content of the flight recorder (--overflow overwrite) to the trace, and
    /// go on; may be repeated
    #[arg(long, value_name = SPEC, value_parser = trigger, help_heading = headings::TRACE)]
    pub snapshot_at: Vec<TriggerSpec>,
    /// Put a mark into the trace at such a call; may be repeated
    #[arg(long, value_name = SPEC, value_parser = trigger, help_heading = headings::TRACE)]
    pub mark_at: Vec<TriggerSpec>,
    /// End the run at such a call, even if the command of --run has not finished; may be repeated
    #[arg(long, value_name = SPEC, value_parser = trigger, help_heading = headings::TRACE)]
    pub end_at: Vec<TriggerSpec>,
    /// Run a shell command at such a call, on this machine, as the user who runs vmtrace, while the guest
    /// goes on. Its environment has VMTRACE_FUNCTION, VMTRACE_CPU and, with --socket, VMTRACE_SOCKET (for
    /// `vmtrace ctl`). Its output goes to standard error; may be repeated
    #[arg(long, value_name = COMMAND_SPEC, value_parser = command, help_heading = headings::TRACE)]
    pub exec_at: Vec<CommandSpec>,
    /// The exit code of a run that --end-at ends
    #[arg(long, value_name = "CODE", default_value_t = 0, requires = "end_at", help_heading = headings::TRACE)]
    pub end_code: u8,
}

/// The number of the next trigger, behind so many.
fn number(before: usize) -> Option<u16> {
    u16::try_from(before).ok().filter(|number| *number < Tracing::MAX_TRIGGERS)
}

impl Triggers {
    fn all(&self) -> impl Iterator<Item = (Action, &TriggerSpec, String)> {
        let Self { start_at, stop_at, snapshot_at, mark_at, end_at, exec_at, .. } = self;
        let lists = [
            (Action::Start, start_at),
            (Action::Stop, stop_at),
            (Action::Snapshot, snapshot_at),
            (Action::Mark, mark_at),
            (Action::End, end_at),
        ];
        let commands = exec_at.iter().map(|spec| (Action::Command, &spec.at, spec.to_string()));
        let all = lists.into_iter().flat_map(|(action, specs)| {
            specs.iter().map(move |spec| (action, spec, spec.to_string()))
        });
        all.chain(commands)
    }

    /// The same as words of a command line.
    pub(super) fn options(&self) -> impl Iterator<Item = String> {
        let code = (self.end_code != 0).then(|| format!("--end-code={}", self.end_code));
        self.all().map(|(action, _, text)| format!("{}={text}", action.option())).chain(code)
    }

    /// What that is in `kernel`, and what the user should know of it.
    ///
    /// # Errors
    /// When there is no such function, or what is asked for cannot be.
    pub(super) fn resolve(
        &self,
        kernel: &Kernel,
        overflow: Overflow,
    ) -> Result<(Vec<Trigger>, Vec<String>)> {
        let (mut triggers, mut notes) = (Vec::new(), Vec::new());
        for (action, spec, text) in self.all() {
            let option = action.option();
            if action == Action::Snapshot && overflow != Overflow::Overwrite {
                bail!(
                    "{option} writes what a flight recorder holds: make the trace one with \
                     --overflow overwrite"
                );
            }
            let spot = Spot::find(kernel, spec).map_err(|error| match error {
                SpotError::NoMatch { .. } => anyhow!("{option} {spec}: {error}"),
                SpotError::Condition(error) => anyhow::Error::new(error).context(option),
            })?;
            notes.extend(spot.notes.into_iter().map(|note| format!("{option}: {note}")));
            let Some(number) = number(triggers.len()) else {
                bail!("there can be {} triggers at most", Tracing::MAX_TRIGGERS);
            };
            let of_command = |it: &&Trigger| it.action == Action::Command;
            let command = triggers.iter().filter(of_command).count();
            triggers.push(Trigger {
                id: u32::from(number) + 1,
                action,
                text,
                sites: spot.sites,
                globs: spot.globs,
                condition: spot.condition,
                call: spec.call,
                left: spec.call,
                number,
                kept: number,
                command: (action == Action::Command).then_some(command),
                live: false,
                fired: false,
            });
        }
        Ok((triggers, notes))
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::boot::tests::args;

    // A condition has blanks, and so has a command.
    #[test]
    fn an_emulated_host_gets_commands() {
        let words = ["boot", "vmlinuz", "--exec-at", "a:3 if pid == 1 -- echo b >&2"];
        let line = <crate::cli::Cli as clap::Parser>::try_parse_from(
            std::iter::once("vmtrace").chain(words),
        );
        let crate::cli::Command::Boot(args) = line.unwrap().command else { panic!("{words:?}") };
        let again: Vec<_> = args.triggers.options().collect();
        assert_eq!(again, ["--exec-at=a:3 if pid == 1 -- echo b >&2"]);
        assert!(crate::cli::boot::tests::args("--exec-at a").is_err());
    }

    // An emulated host gets them as text again: one that is lost there never comes.
    #[test]
    fn an_emulated_host_gets_all_of_them() {
        let line =
            "--start-at=a:2 --stop-at=b,c --mark-at=d --end-at=e --snapshot-at=f --end-code=7";
        let again: Vec<_> = args(line).unwrap().triggers.options().collect();
        let mut words: Vec<_> = line.split(' ').collect();
        words.sort_unstable();
        let mut sorted = again.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, words);
        assert!(args("--end-code 3").is_err(), "without an end");
        assert!(args("--stop-at a:0").is_err() && args("--stop-at x=a").is_err());
    }
}
