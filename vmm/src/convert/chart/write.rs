//! Writes the page.

use std::fs::File;
use std::io::{self, BufWriter, Write};

use rustc_hash::FxHashMap;
use serde_json::json;

use super::super::ground::task_name;
use super::{Chart, End, Kept};
use crate::export::Name;

/// Numbers of JavaScript are exact up to here.
const EXACT: u64 = (1 << 53) - 1;

/// JSON that may be inside of a `script` element: no `<`, which only texts can have.
struct Inside<'a>(&'a mut BufWriter<File>);

impl Write for Inside<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for piece in bytes.split_inclusive(|byte| b"<>&".contains(byte)) {
            match piece.split_last() {
                Some((last, rest)) if b"<>&".contains(last) => {
                    self.0.write_all(rest)?;
                    write!(self.0, "\\u{last:04x}")?;
                }
                _ => self.0.write_all(piece)?,
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// A text of HTML.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '"' => escaped.push_str("&quot;"),
            c if c.is_control() => escaped.push('?'),
            c => escaped.push(c),
        }
    }
    escaped
}

pub(super) struct Page<'a> {
    chart: &'a Chart,
    /// Numbers of names in the page, which has only those that are shown.
    names: FxHashMap<u32, usize>,
    shown: Vec<u32>,
}

impl<'a> Page<'a> {
    pub(super) fn new(chart: &'a Chart) -> Self {
        Self { chart, names: FxHashMap::default(), shown: Vec::new() }
    }

    pub(super) fn write(mut self, notes: &[String]) -> io::Result<()> {
        let chart = self.chart;
        let mut out = BufWriter::with_capacity(1 << 18, chart.out.try_clone()?);
        let header = &chart.header;
        let about = format!("Linux {} ({})", header.release, header.arch);
        let (before, rest) = split(include_str!("page.html"), "<!-- title -->")?;
        write!(out, "{before}{}", escape(&about))?;
        let (before, rest) = split(rest, "/* style */")?;
        write!(out, "{before}{}", include_str!("page.css"))?;
        let (before, rest) = split(rest, "<!-- about -->")?;
        let vcpus = header.vcpus;
        write!(out, "{before}{}, {vcpus} vCPUs, vmtrace ", escape(&about))?;
        write!(out, "{}", escape(&header.vmtrace_version))?;
        let (before, rest) = split(rest, "<!-- notes -->")?;
        write!(out, "{before}")?;
        for note in self.missing().iter().chain(notes) {
            writeln!(out, "<li>{}</li>", escape(note))?;
        }
        let (before, rest) = split(rest, "/* data */")?;
        write!(out, "{before}")?;
        self.data(&mut out)?;
        let (before, rest) = split(rest, "/* script */")?;
        write!(out, "{before}{}{rest}", include_str!("page.js"))?;
        out.flush()
    }

    /// What a reader of the page must know.
    fn missing(&self) -> Vec<String> {
        let (entries, calls) = self.chart.kept.had();
        let mut missing = Vec::new();
        if self.chart.losses > 0 {
            let count = self.chart.losses;
            missing
                .push(format!("{count} records were lost: calls are missing where red lines are"));
        }
        if entries > 0 && !calls {
            missing.push(
                "No returns were recorded, so it is not known how long calls took: entries are \
                 shown as ticks. For calls with durations boot with --graph."
                    .to_owned(),
            );
        } else if entries > 0 {
            missing.push(format!(
                "{entries} entries have no recorded return, and are shown as ticks: boot with --graph \
                 for more returns"
            ));
        } else if !calls {
            missing.push("The trace has no calls: see vmtrace report --stats".to_owned());
        }
        if self.chart.kept.calls.iter().any(|call| call.end == End::Unseen) {
            missing.push(
                "The ends of calls with a dashed line were not seen: they last until that was known"
                    .to_owned(),
            );
        }
        missing
    }

    fn number(&mut self, name: u32) -> usize {
        let next = self.shown.len();
        let number = *self.names.entry(name).or_insert(next);
        if number == next {
            self.shown.push(name);
        }
        number
    }

    /// `[since, duration, depth, name, vcpu, end]` of each call, and `[at, count, depth, name, vcpu]` of
    /// each entry, in one list for each task: numbers take less room than objects.
    fn data(&mut self, out: &mut BufWriter<File>) -> io::Result<()> {
        let chart = self.chart;
        let exact = |number: u64| number.min(EXACT);
        write!(out, "{{\"since\":{},", exact(chart.since.unwrap_or(0)))?;
        write!(out, "\"until\":{},\"tasks\":[", exact(chart.now))?;
        let Kept { calls, instants, .. } = &chart.kept;
        let (mut calls, mut instants) = (&calls[..], &instants[..]);
        let mut comma = "";
        for (number, task) in (0..).zip(&chart.tasks) {
            let (these, rest) = calls.split_at(calls.partition_point(|it| it.task == number));
            calls = rest;
            let (ticks, rest) = instants.split_at(instants.partition_point(|it| it.task == number));
            instants = rest;
            if these.is_empty() && ticks.is_empty() {
                continue;
            }
            let comm = task_name(task.vcpu, task.pid, task.comm.as_deref());
            let about = json!({ "comm": comm, "pid": task.pid, "tracer": task.tracer });
            write!(out, "{comma}\n[")?;
            serde_json::to_writer(Inside(out), &about)?;
            comma = ",";
            let mut separator = ",[";
            for it in these {
                let name = self.number(it.name);
                let (since, duration) = (exact(it.since), exact(it.duration));
                let end = it.end as u8;
                write!(out, "{separator}{since},{duration},{},{name},{},{end}", it.depth, it.vcpu)?;
                separator = ",";
            }
            out.write_all(if these.is_empty() { b",[]" } else { b"]" })?;
            let mut separator = ",[";
            for it in ticks {
                let (name, at) = (self.number(it.name), exact(it.at));
                write!(out, "{separator}{at},{},{},{name},{}", it.count, it.depth, it.vcpu)?;
                separator = ",";
            }
            out.write_all(if ticks.is_empty() { b",[]]" } else { b"]]" })?;
        }
        write!(out, "],\n\"names\":[")?;
        for (place, number) in self.shown.iter().enumerate() {
            let label = chart.names.get(*number).map_or_else(String::new, |known| {
                let symbol = known.symbol.as_ref();
                let symbol = symbol.map(|(symbol, module)| (&**symbol, &**module));
                Name { address: known.address, symbol, number: None }.label()
            });
            out.write_all(if place == 0 { b"" } else { b"," })?;
            serde_json::to_writer(Inside(out), &label)?;
        }
        write!(out, "],\n\"marks\":[")?;
        for (place, mark) in chart.marks.iter().enumerate() {
            out.write_all(if place == 0 { b"" } else { b"," })?;
            let (at, duration) = (exact(mark.at), exact(mark.duration));
            let mark = json!([at, duration, u8::from(mark.loss), mark.text]);
            serde_json::to_writer(Inside(out), &mark)?;
        }
        write!(out, "]}}")
    }
}

/// What is before and behind a place of the page.
fn split<'a>(page: &'a str, place: &str) -> io::Result<(&'a str, &'a str)> {
    page.split_once(place).ok_or_else(|| io::Error::other("the page has lost a place"))
}
