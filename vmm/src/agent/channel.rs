//! Parses the lines that the guest agent writes to its serial port; `guest-agent/README.md`
//! specifies them.
//!
//! Any program in the guest can write to that port. So everything here is bounded, and its content is
//! only shown or counted.

use vmtrace_agent::protocol::MARK_MAX;

/// The longest line of the agent; a longer one is from another program.
const LINE_MAX: usize = 256;
const PREFIX: &str = "vmtrace-agent 1 ";

/// A point in time that somebody in the guest wants to find in the trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentMark {
    /// The clock of the records.
    pub ticks: u64,
    /// At most [`MARK_MAX`] bytes, no control characters.
    pub text: String,
}

impl AgentMark {
    /// From `TICKS TEXT`, which is what follows `mark ` on the serial port and on the trace port.
    pub fn parse(line: &str) -> Option<Self> {
        let (ticks, text) = line.split_once(' ')?;
        // `parse` takes a sign as well.
        let digits = ticks.bytes().all(|byte| byte.is_ascii_digit());
        let ticks = ticks.parse().ok().filter(|_| digits && Self::is_text(text))?;
        Some(Self { ticks, text: text.to_owned() })
    }

    /// Whether a mark can have this text.
    pub fn is_text(text: &str) -> bool {
        !text.is_empty() && text.len() <= MARK_MAX && !text.chars().any(char::is_control)
    }
}

/// A message of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentMessage {
    /// The agent runs; its version.
    Hello(String),
    /// The command line exited with this status.
    Exit(u8),
    /// This signal ended the command line.
    Signal(u8),
    /// Something went wrong in the agent.
    Error(String),
    /// Put this into the trace.
    Mark(AgentMark),
    /// Why the host cannot connect to the agent by vsock.
    NoVsock(String),
    /// Why the command's output goes to the console.
    ToConsole(String),
}

/// Takes bytes as they come and gives messages. What is no message is dropped.
#[derive(Debug, Default)]
pub struct AgentParser {
    line: Vec<u8>,
    /// The line is too long already; wait for its end.
    skip: bool,
}

impl AgentParser {
    /// A parser at the start of a line.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes one byte; the one that ends a line may complete a message.
    pub fn push(&mut self, byte: u8) -> Option<AgentMessage> {
        if byte != b'\n' {
            self.skip |= self.line.len() == LINE_MAX;
            if !self.skip {
                self.line.push(byte);
            }
            return None;
        }
        let message = if self.skip { None } else { parse(&self.line) };
        self.line.clear();
        self.skip = false;
        message
    }

    /// Takes several bytes.
    pub fn extend<'a>(&'a mut self, bytes: &'a [u8]) -> impl Iterator<Item = AgentMessage> + 'a {
        bytes.iter().filter_map(|byte| self.push(*byte))
    }
}

fn parse(line: &[u8]) -> Option<AgentMessage> {
    let line = std::str::from_utf8(line).ok()?;
    let line = line.strip_suffix('\r').unwrap_or(line);
    if line.chars().any(char::is_control) {
        return None;
    }
    let (kind, value) = line.strip_prefix(PREFIX)?.split_once(' ')?;
    Some(match kind {
        "hello" => AgentMessage::Hello(value.to_owned()),
        "exit" => AgentMessage::Exit(value.parse().ok()?),
        "signal" => AgentMessage::Signal(value.parse().ok()?),
        "error" => AgentMessage::Error(value.to_owned()),
        "mark" => AgentMessage::Mark(AgentMark::parse(value)?),
        "novsock" => AgentMessage::NoVsock(value.to_owned()),
        "console" => AgentMessage::ToConsole(value.to_owned()),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(bytes: &[u8]) -> Vec<AgentMessage> {
        AgentParser::new().extend(bytes).collect()
    }

    #[test]
    fn messages() {
        let text = b"vmtrace-agent 1 hello 0.1.0\nvmtrace-agent 1 error a: b c\r\nnoise\n\
            vmtrace-agent 1 new thing\nvmtrace-agent 2 exit 1\nvmtrace-agent 1 signal 9\nvmtrace-agent 1 exit 255\n";
        assert_eq!(
            all(text),
            [
                AgentMessage::Hello("0.1.0".into()),
                AgentMessage::Error("a: b c".into()),
                AgentMessage::Signal(9),
                AgentMessage::Exit(255),
            ]
        );
    }

    #[test]
    fn marks() {
        let mark = |ticks, text: &str| AgentMark { ticks, text: text.to_owned() };
        let longest = "x".repeat(MARK_MAX);
        assert_eq!(AgentMark::parse("0 a  b "), Some(mark(0, "a  b ")));
        assert_eq!(AgentMark::parse(&format!("5 {longest}")), Some(mark(5, &longest)));
        let largest = format!("vmtrace-agent 1 mark {} {longest}\n", u64::MAX);
        assert_eq!(all(largest.as_bytes()), [AgentMessage::Mark(mark(u64::MAX, &longest))]);
        for line in ["", "1", "1 ", "x y", "-1 a", "+1 a", "18446744073709551616 a", "1 a\x07"] {
            assert_eq!(AgentMark::parse(line), None, "{line:?}");
        }
        assert_eq!(AgentMark::parse(&format!("5 {longest}x")), None);
        let reason = AgentMessage::NoVsock("the kernel has no AF_VSOCK".into());
        assert_eq!(all(b"vmtrace-agent 1 novsock the kernel has no AF_VSOCK\n"), [reason]);
        let reason = AgentMessage::ToConsole("no AF_VSOCK".into());
        assert_eq!(all(b"vmtrace-agent 1 console no AF_VSOCK\n"), [reason]);
    }

    #[test]
    fn what_the_guest_may_try() {
        let long = format!("vmtrace-agent 1 error {}\nvmtrace-agent 1 exit 0\n", "x".repeat(5000));
        assert_eq!(all(long.as_bytes()), [AgentMessage::Exit(0)]);
        for line in ["exit 256", "exit -1", "exit", "exit  1", "error a\x1b[2Jb", "signal \u{663}"]
        {
            assert_eq!(all(format!("vmtrace-agent 1 {line}\n").as_bytes()), [], "{line}");
        }
        assert_eq!(all(b"vmtrace-agent 1 error \xff\n"), []);
        assert_eq!(all(b"vmtrace-agent 1 exit 0"), [], "a line must end");
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(text in "(vmtrace-agent 1 (exit|signal|error|hello) [0-9a-z]{0,4}\r?\n|\\PC{0,20}\n){0,8}",
                                cut in any::<prop::sample::Index>()) {
            let bytes = text.as_bytes();
            let (a, b) = bytes.split_at(cut.index(bytes.len() + 1));
            let mut parser = AgentParser::new();
            let mut pieces: Vec<_> = parser.extend(a).collect();
            pieces.extend(parser.extend(b));
            prop_assert_eq!(pieces, all(bytes));
        }

        #[test]
        fn memory_is_bounded(bytes in prop::collection::vec(any::<u8>(), 0..4000)) {
            let mut parser = AgentParser::new();
            for byte in bytes {
                parser.push(byte);
                prop_assert!(parser.line.len() <= LINE_MAX);
            }
        }
    }
}
