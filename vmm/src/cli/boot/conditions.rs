//! Options that limit which calls are recorded.

use crate::condition::{Condition, ConditionError};

/// What `--if` has.
pub(super) fn parse(text: &str) -> Result<Condition, String> {
    text.parse().map_err(|error: ConditionError| error.to_string())
}

/// A name that can stand in a condition.
pub(super) fn parse_comm(text: &str) -> Result<String, String> {
    match text.contains('"') || text.is_empty() {
        true => Err(format!("{text:?} is not the name of a task: use one without quotes")),
        false => Ok(text.to_owned()),
    }
}

/// What `--pid` and `--comm` ask for: one of each that is given.
pub(super) fn tasks(pids: &[u32], comms: &[String]) -> Result<Option<Condition>, ConditionError> {
    let pids = pids.iter().map(|pid| format!("pid == {pid}")).collect::<Vec<_>>();
    let comms = comms.iter().map(|comm| format!("comm == \"{comm}\"")).collect::<Vec<_>>();
    let given = [pids, comms].into_iter().filter(|list| !list.is_empty());
    let given = given.map(|list| list.join(" || ").parse());
    let given = given.collect::<Result<Vec<Condition>, _>>()?;
    Condition::all(&given.iter().collect::<Vec<_>>())
}

/// What `--min-duration` asks for, in nanoseconds.
pub(super) fn at_least(nanoseconds: u64) -> Result<Condition, ConditionError> {
    format!("duration >= {nanoseconds}ns").parse()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_each_that_is_given_has_to_be_right() {
        let text = |pids: &[u32], comms: &[&str]| {
            let comms: Vec<_> = comms.iter().map(ToString::to_string).collect();
            tasks(pids, &comms).unwrap().map(|condition| condition.to_string())
        };
        assert_eq!(text(&[], &[]), None);
        assert_eq!(text(&[1], &[]).unwrap(), "pid == 1");
        assert_eq!(
            text(&[1, 2], &["a", "b c*"]).unwrap(),
            "(pid == 1 || pid == 2) && (comm == \"a\" || comm == \"b c*\")"
        );
        assert!(parse_comm("a\"b").is_err() && parse_comm("").is_err());
        assert_eq!(parse("pid = 1").unwrap_err().lines().count(), 1);
    }
}
