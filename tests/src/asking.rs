//! Requests of the guest's program, over its console: numbered, answered line by line, and repeated when an answer is
//! not whole.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{PipeWriter, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::console::Console;

/// For one answer of the guest or of vmtrace: a busy machine is ten times slower than an idle one.
pub(crate) const PATIENCE: Duration = Duration::from_secs(400);
/// After so long a request is made again: a message of the kernel can stand in the answer.
const AGAIN: Duration = Duration::from_secs(20);

/// Who asks the guest's `stress` program.
#[derive(Debug)]
pub(crate) struct Asking {
    console: Console,
    input: PipeWriter,
    /// Requests so far.
    requests: usize,
}

impl Asking {
    /// Of a guest with this console, whose standard input is the other end of `input`.
    pub(crate) fn new(console: Console, input: PipeWriter) -> Self {
        Self { console, input, requests: 0 }
    }

    /// Waits until the program has begun.
    pub(crate) fn ready(&self) -> Result<()> {
        let ready = |said: &str| said.contains("stress ready").then_some(());
        self.console.wait(PATIENCE, ready)?.context("the guest's program does not begin")
    }

    /// Makes a request, and returns it with its number.
    pub(crate) fn request(&mut self, request: &str) -> Result<String> {
        self.requests += 1;
        let request = format!("{} {request}", self.requests);
        writeln!(self.input, "{request}")?;
        Ok(request)
    }

    /// The lines of the answer.
    pub(crate) fn answer(&mut self, request: &str) -> Result<Vec<String>> {
        let (number, _) = request.split_once(' ').context("no number")?;
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if let Some(lines) = self.console.wait(AGAIN, |said| whole_answer(said, number))? {
                return Ok(lines);
            }
            writeln!(self.input, "{request}")?;
        }
        bail!("the guest does not answer {request:?}")
    }

    /// Makes a request and waits for its answer.
    pub(crate) fn ask(&mut self, request: &str) -> Result<Vec<String>> {
        let request = self.request(request)?;
        self.answer(&request)
    }

    /// Another line of standard input.
    pub(crate) fn line(&mut self, line: &str) -> Result<()> {
        Ok(writeln!(self.input, "{line}")?)
    }

    /// Ends the program, if it is still there.
    pub(crate) fn end(&mut self) {
        let _ = self.line("end");
    }
}

/// What tells whether the lines of an answer are as they were sent.
#[must_use]
pub fn hash<'a>(lines: impl IntoIterator<Item = &'a str>) -> u64 {
    let mut hasher = DefaultHasher::new();
    lines.into_iter().for_each(|line| line.hash(&mut hasher));
    hasher.finish()
}

/// The lines of the answer to the request of that number, once they have come as they were sent.
fn whole_answer(said: &str, number: &str) -> Option<Vec<String>> {
    let mut lines = Vec::new();
    for line in said.lines() {
        let Some((of, text)) = line.trim().split_once(": ") else { continue };
        match text.strip_prefix("done ") {
            _ if of != number => {}
            None => lines.push(text),
            Some(sent) if sent == format!("{:x}", hash(lines.iter().copied())) => {
                return Some(lines.into_iter().map(str::to_owned).collect());
            }
            Some(_) => lines.clear(),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    // A console shows what is typed as well, and has other lines between those of an answer, or in them.
    #[test]
    fn an_answer_is_taken_when_it_is_whole() {
        let lines = |said: &str| whole_answer(said, "7");
        let done = format!("7: done {:x}\n", hash(["differs 1 2", "differs 3 4"]));
        let said = "7 compare\n7: differs 1 2\n[  1.5] a message\n7: differs 3 4\n";
        assert_eq!(lines(said), None);
        let expected = Some(vec!["differs 1 2".to_owned(), "differs 3 4".to_owned()]);
        assert_eq!(lines(&format!("{said}{done}")), expected);
        // One line is torn; all of them come again.
        let torn = "7 compare\n7: diff[  1.5] a message\ners 1 2\n7: differs 3 4\n";
        assert_eq!(lines(&format!("{torn}{done}")), None);
        assert_eq!(lines(&format!("{torn}{done}{said}{done}")), expected);
        let none = format!("{:x}", hash([]));
        assert_eq!(lines(&format!("7: done {none}\n")), Some(Vec::new()));
        assert_eq!(lines(&format!("17: done {none}\n6: done {none}\n")), None);
    }
}
