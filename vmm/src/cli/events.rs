//! `vmtrace events`: which tracepoints a kernel has, with their fields.

use std::io::Write;
use std::path::PathBuf;

use serde::Serialize;

use super::terminal::Paging;
use crate::kernel::tracepoints::{Event, Origin};
use crate::kernel::{Kernel, glob};

/// Arguments of `vmtrace events`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Kernel image: bzImage (vmlinuz), vmlinux, or a riscv64 Image
    kernel: PathBuf,
    /// Only events that the pattern matches: SYSTEM:NAME, or NAME of any system
    #[arg(value_name = "GLOB")]
    glob: Option<String>,
    /// Print JSON: one object a line
    #[arg(long)]
    json: bool,
    /// Print how many there are, and nothing else
    #[arg(long, conflicts_with = "json")]
    count: bool,
    /// Take the symbols from this file of the same build
    #[arg(long, value_name = "FILE")]
    system_map: Option<PathBuf>,
    #[command(flatten)]
    paging: Paging,
}

/// Prints each event: its name, a tab, its fields with their types.
///
/// # Errors
/// When the kernel cannot be read, or no event matches.
pub fn run(args: Args) -> anyhow::Result<u8> {
    let Args { kernel, glob, json, count, system_map, paging } = args;
    let kernel = super::inspect::open(&kernel, system_map.as_deref())?;
    let events = matching(&kernel, glob.as_deref().unwrap_or("*"))?;
    paging.show(|out| match count {
        true => writeln!(out, "{}", events.len()),
        false => print(out, &events, json),
    })?;
    Ok(0)
}

/// The events that a pattern matches.
fn matching<'a>(kernel: &'a Kernel, pattern: &str) -> anyhow::Result<Vec<&'a Event>> {
    let all = kernel.events()?;
    let wanted = |event: &&Event| match pattern.contains(':') {
        true => glob::matches(pattern, &event.full_name()),
        false => glob::matches(pattern, &event.name),
    };
    let found: Vec<&Event> = all.iter().filter(wanted).collect();
    anyhow::ensure!(
        !found.is_empty(),
        "no event of the kernel matches '{pattern}': vmtrace events lists all, as SYSTEM:NAME"
    );
    Ok(found)
}

/// The JSON form; other programs rely on its keys.
#[derive(Serialize)]
struct Line<'a> {
    name: String,
    /// Of the tracepoint that it comes from.
    #[serde(skip_serializing_if = "Option::is_none")]
    tracepoint: Option<&'a str>,
    fields: Vec<Field<'a>>,
    print: &'a str,
}

#[derive(Serialize)]
struct Field<'a> {
    name: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    size: u32,
    signed: bool,
}

impl<'a> Line<'a> {
    fn new(event: &'a Event) -> Self {
        let tracepoint = match &event.origin {
            Origin::Tracepoint(name, _) => Some(&**name),
            Origin::Syscall { .. } | Origin::Switch(_) | Origin::Other => None,
        };
        let field = |field: &'a crate::kernel::tracepoints::EventField| Field {
            name: &field.name,
            kind: &field.kind,
            size: field.size,
            signed: field.signed,
        };
        let fields = event.fields.iter().map(field).collect();
        Self { name: event.full_name(), tracepoint, fields, print: &event.print }
    }
}

fn print(mut out: &mut dyn Write, events: &[&Event], json: bool) -> std::io::Result<()> {
    for event in events {
        if json {
            serde_json::to_writer(&mut out, &Line::new(event))?;
            writeln!(out)?;
            continue;
        }
        let fields: Vec<String> = event.fields.iter().map(declared).collect();
        writeln!(out, "{}\t{}", event.full_name(), fields.join(", "))?;
    }
    Ok(())
}

/// As C declares it.
fn declared(field: &crate::kernel::tracepoints::EventField) -> String {
    let (kind, name) = (&field.kind, &field.name);
    match kind.split_once('[') {
        Some((element, count)) => format!("{element} {name}[{count}"),
        None => format!("{kind} {name}"),
    }
}
