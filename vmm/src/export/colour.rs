//! Colours the lines of a text for a terminal.
//!
//! The text itself does not change. The kind of a line is recognised by its form; other lines stay
//! as they are.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};

const COMMENT: Style = Style::new().dimmed();
const LOST: Style = AnsiColor::Red.on_default().bold();
const TASK: Style = AnsiColor::Green.on_default();
const FUNCTION: Style = Style::new().bold();
const EVENT: Style = AnsiColor::Cyan.on_default().bold();
const CALLER: Style = Style::new().dimmed();
/// From 10 us, from 1 ms, from 100 ms: those that function_graph marks so.
const LONG: Style = AnsiColor::Yellow.on_default();
const LONGER: Style = AnsiColor::Red.on_default();
const LONGEST: Style = AnsiColor::Magenta.on_default().bold();

/// A longer line is none of ours, or nobody sees its end.
const LINE: usize = 64 << 10;

/// Gives the lines of [`Text`](super::Text) and [`Graph`](super::Graph) colours.
#[derive(Debug)]
pub struct Colours<W: Write> {
    out: W,
    line: Vec<u8>,
}

impl<W: Write> Colours<W> {
    /// On their way to `out`.
    pub fn new(out: W) -> Self {
        Self { out, line: Vec::new() }
    }

    fn end_line(&mut self) -> io::Result<()> {
        let line = std::mem::take(&mut self.line);
        let done = match std::str::from_utf8(&line) {
            Ok(text) => write_line(&mut self.out, text),
            Err(_) => self.out.write_all(&line),
        };
        self.line = line;
        self.line.clear();
        done
    }
}

impl<W: Write> Write for Colours<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for part in bytes.split_inclusive(|&byte| byte == b'\n') {
            self.line.extend_from_slice(part);
            if part.ends_with(b"\n") || self.line.len() >= LINE {
                self.end_line()?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.end_line()?;
        self.out.flush()
    }
}

fn styled(out: &mut impl Write, style: Style, text: &str) -> io::Result<()> {
    write!(out, "{style}{text}{style:#}")
}

fn write_line(out: &mut impl Write, line: &str) -> io::Result<()> {
    let (text, end) = line.strip_suffix('\n').map_or((line, ""), |text| (text, "\n"));
    if text.starts_with('#') || text.starts_with(" -----") {
        styled(out, COMMENT, text)?;
    } else if text.starts_with("CPU:") && text.contains(" [LOST ") {
        styled(out, LOST, text)?;
    } else if let Some(at) = duration_end(text) {
        graph(out, text.split_at(at))?;
    } else if let Some((front, what)) = front(text) {
        record(out, front, what)?;
    } else {
        out.write_all(text.as_bytes())?;
    }
    out.write_all(end.as_bytes())
}

/// Where the column of durations ends in a line of a graph: behind its bar.
fn duration_end(text: &str) -> Option<usize> {
    // A vCPU, the state of the CPU in a column of its own, a mark and a duration come before it.
    let (front, rest) = text.split_once('|')?;
    let (cpu, column) = front.trim_start().split_once(')')?;
    if cpu.is_empty() || !cpu.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let is_duration = column.trim().is_empty() || column.trim_end().ends_with(" us");
    let state = if is_duration { 0 } else { rest.find('|')? + 1 };
    Some(front.len() + 1 + state)
}

fn graph(out: &mut impl Write, (front, call): (&str, &str)) -> io::Result<()> {
    // The marks of `trace_print_graph_duration`.
    let column = front.trim_end_matches('|').rsplit([')', '|']).next().unwrap_or_default();
    let mark = column.trim_start().chars().next();
    let style = match mark {
        Some('+' | '!') => Some(LONG),
        Some('#' | '*') => Some(LONGER),
        Some('@' | '$') => Some(LONGEST),
        _ => None,
    };
    match style {
        Some(style) => {
            let (before, duration) = front.split_at(front.len() - 1 - column.len());
            out.write_all(before.as_bytes())?;
            styled(out, style, duration)?;
        }
        None => out.write_all(front.as_bytes())?,
    }
    let name = call.trim_start();
    let (indent, _) = call.split_at(call.len() - name.len());
    out.write_all(indent.as_bytes())?;
    if name.starts_with("/*") {
        return styled(out, EVENT, name);
    }
    let end = name.find(['(', ' ']).unwrap_or(name.len());
    let (function, rest) = name.split_at(if name.starts_with('}') { 0 } else { end });
    if !function.is_empty() {
        styled(out, FUNCTION, function)?;
    }
    out.write_all(rest.as_bytes())
}

/// `COMM-PID [CPU] FLAGS TIME: ` and the rest.
fn front(text: &str) -> Option<(&str, &str)> {
    let (task, rest) = text.split_once(" [")?;
    let (cpu, rest) = rest.split_once("] ")?;
    let (_, pid) = task.trim_end().rsplit_once('-')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !is_number(cpu) || !is_number(pid) {
        return None;
    }
    let (time, _) = rest.split_once(": ")?;
    let at = text.len() - rest.len() + time.len() + 2;
    Some(text.split_at(at))
}

fn record(out: &mut impl Write, front: &str, what: &str) -> io::Result<()> {
    let (task, rest) = front.split_at(front.find(" [").unwrap_or(0));
    styled(out, TASK, task)?;
    out.write_all(rest.as_bytes())?;
    let end = what.find(['(', ' ', ':']).unwrap_or(what.len());
    let (name, rest) = what.split_at(end);
    styled(out, if rest.starts_with(':') { EVENT } else { FUNCTION }, name)?;
    match rest.rfind(" <-") {
        Some(at) => {
            let (args, caller) = rest.split_at(at);
            out.write_all(args.as_bytes())?;
            styled(out, CALLER, caller)
        }
        None => out.write_all(rest.as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn coloured(text: &[u8], piece: usize) -> Vec<u8> {
        let mut colours = Colours::new(Vec::new());
        text.chunks(piece.max(1)).for_each(|part| colours.write_all(part).unwrap());
        colours.flush().unwrap();
        colours.out
    }

    /// Without colours again.
    fn plain(text: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut rest = text;
        while let Some((&first, more)) = rest.split_first() {
            rest = more;
            if first == 0x1b && rest.first() == Some(&b'[') {
                let end = rest.iter().position(|&byte| byte == b'm').unwrap();
                rest = &rest[end + 1..];
            } else {
                out.push(first);
            }
        }
        out
    }

    #[test]
    fn each_kind_of_line_has_its_colours() {
        for (line, expected) in [
            ("# tracer: function", "\x1b[2m# tracer: function\x1b[0m"),
            ("CPU:1 [LOST 7 EVENTS]", "\x1b[1m\x1b[31mCPU:1 [LOST 7 EVENTS]\x1b[0m"),
            (
                "              ls-128     [001]     20.531986: vfs_readlink(a=1) <-do_readlinkat",
                "\x1b[32m              ls-128    \x1b[0m [001]     20.531986: \
                 \x1b[1mvfs_readlink\x1b[0m(a=1)\x1b[2m <-do_readlinkat\x1b[0m",
            ),
            (
                "          <idle>-0       [001] d.h1.    18.119999: irq_handler_exit: irq=10",
                "\x1b[32m          <idle>-0      \x1b[0m [001] d.h1.    18.119999: \
                 \x1b[1m\x1b[36mirq_handler_exit\x1b[0m: irq=10",
            ),
            (
                " 1) # 8865.799 us |  vfs_open();",
                " 1)\x1b[31m # 8865.799 us |\x1b[0m  \x1b[1mvfs_open\x1b[0m();",
            ),
            (" 1)   0.129 us    |  }", " 1)   0.129 us    |  }"),
            (
                " 1) d.h. |               |  /* sched_switch: x */",
                " 1) d.h. |               |  \x1b[1m\x1b[36m/* sched_switch: x */\x1b[0m",
            ),
            (
                " 1) ..... | + 12.345 us   |  vfs_open();",
                " 1) ..... |\x1b[33m + 12.345 us   |\x1b[0m  \x1b[1mvfs_open\x1b[0m();",
            ),
            (" 1) ..... |   0.129 us    |  }", " 1) ..... |   0.129 us    |  }"),
            (" 1) ..... | and no more", " 1) ..... | and no more"),
            ("VERDICT - none [of] ours: ", "VERDICT - none [of] ours: "),
        ] {
            let out = coloured(line.as_bytes(), 7);
            assert_eq!(String::from_utf8(out).unwrap(), expected, "{line}");
        }
    }

    proptest! {
        // Who sees a line must see all of it, and nothing else.
        #[test]
        fn nothing_but_colours_is_added(
            text in "([ #CPU:\\[\\]LOST0-9a-z|)(<\\-{};/*+!\n]|é){0,200}", piece in 1..40_usize
        ) {
            prop_assert_eq!(plain(&coloured(text.as_bytes(), piece)), text.as_bytes());
        }
    }
}
