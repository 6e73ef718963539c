//! `vmtrace events`: which tracepoints a kernel has, and its modules, with their fields.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use serde::Serialize;

use super::boot::modules_in;
use super::module_files;
use super::report::tell_notes;
use super::terminal::Paging;
use crate::kernel::tracepoints::{Event, ModuleData, Origin};
use crate::kernel::{Functions, Kernel};
use crate::session::{has_only_arguments, is_meant_in};

/// Arguments of `vmtrace events`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Kernel image: bzImage (vmlinuz), vmlinux, or a riscv64 Image
    kernel: PathBuf,
    /// List only events that match: SYSTEM:NAME, or NAME of any system. With :mod:NAME at the end, or
    /// alone, those of a module
    #[arg(value_name = "GLOB")]
    glob: Option<String>,
    /// Also list the events of the modules in this directory, which has the layout of
    /// /lib/modules/RELEASE. auto finds it as `vmtrace boot` does
    #[arg(long, value_name = "DIR|auto")]
    modules: Option<PathBuf>,
    /// Print JSON: one object per line
    #[arg(long)]
    json: bool,
    /// Print only their number
    #[arg(long, conflicts_with = "json")]
    count: bool,
    /// Take the symbols from this file of the same build
    #[arg(long, value_name = "FILE")]
    system_map: Option<PathBuf>,
    #[command(flatten)]
    paging: Paging,
}

/// What is behind the fields of an event that is recorded with other values.
const ONLY: &str = "[only arguments]";
pub(super) const HELP: &str = "\
Events with [only arguments] (JSON: only_arguments) are recorded with the arguments of their \
tracepoint, by the types that the kernel has for these, in place of the fields that are listed.";

/// An event, and the module that has it, if it is none of the kernel's own.
type Found = (Event, Option<String>);

/// Prints each event: its name, for one of a module that in brackets, a tab, its fields with their types,
/// and where these are not what is recorded a tab and [`ONLY`].
///
/// # Errors
/// When the kernel or a module cannot be read, or no event matches.
pub fn run(args: Args) -> anyhow::Result<u8> {
    let Args { kernel, glob, modules, json, count, system_map, paging } = args;
    let image = kernel;
    let kernel = super::inspect::open(&image, system_map.as_deref())?;
    let pattern = glob.as_deref().unwrap_or("*");
    let events = kernel.events().with_context(|| image.display().to_string())?;
    let mut found = matching(events, pattern, None);
    let mut left_out = Vec::new();
    match modules {
        Some(dir) => {
            let dir = modules_in(dir, &image, kernel.release())?;
            match kernel.check_module_tracepoints() {
                // Those of the kernel are there.
                Err(error) if !found.is_empty() => {
                    left_out.push(format!("events of modules are left out: {error}"));
                }
                Err(error) => return Err(error).context(image.display().to_string()),
                Ok(()) => {
                    let more;
                    (more, left_out) = of_modules(&kernel, &dir, pattern)?;
                    found.extend(more);
                }
            }
        }
        None if Functions::of(pattern).module().is_some() => {
            bail!("{pattern}: which modules? Use --modules DIR, or auto")
        }
        None => {}
    }
    if found.is_empty() {
        tell_notes(&left_out);
        bail!(
            "no event of the kernel matches '{pattern}': vmtrace events lists all, as SYSTEM:NAME, and with \
             --modules DIR those of modules"
        );
    }
    let seen = paging.show(|out| match count {
        true => writeln!(out, "{}", found.len()),
        false => print(out, &found, json),
    });
    // Behind what a pager shows.
    tell_notes(&left_out);
    seen.map(|()| 0)
}

/// The events of the kernel, or of a module of it, that a pattern matches.
fn matching(events: &[Event], pattern: &str, module: Option<&str>) -> Vec<Found> {
    let wanted = events.iter().filter(|event| is_meant_in(pattern, &event.full_name(), module));
    wanted.map(|event| (event.clone(), module.map(str::to_owned))).collect()
}

/// The events of modules, and which modules are left out.
fn of_modules(
    kernel: &Kernel,
    dir: &Path,
    pattern: &str,
) -> anyhow::Result<(Vec<Found>, Vec<String>)> {
    let mut found = Vec::new();
    let left_out = module_files::each(
        dir,
        kernel,
        |name| Functions::of(pattern).reaches(name),
        |name, data| {
            let data = ModuleData::parse(data)?;
            module_files::check(data.arch(), kernel)?;
            found.extend(matching(&kernel.module_file_events(&data)?, pattern, Some(name)));
            Ok(())
        },
    )?;
    Ok((found, left_out))
}

/// The JSON form; other programs rely on its keys.
#[derive(Serialize)]
struct Line<'a> {
    name: String,
    /// Whose it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    module: Option<&'a str>,
    /// Of the tracepoint that it comes from.
    #[serde(skip_serializing_if = "Option::is_none")]
    tracepoint: Option<&'a str>,
    fields: Vec<Field<'a>>,
    print: &'a str,
    /// Whether it is recorded with the arguments of its tracepoint in place of the fields.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    only_arguments: bool,
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
    fn new((event, module): &'a Found) -> Self {
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
        let module = module.as_deref();
        let (name, only_arguments) = (event.full_name(), has_only_arguments(event));
        Self { name, module, tracepoint, fields, print: &event.print, only_arguments }
    }
}

fn print(mut out: &mut dyn Write, events: &[Found], json: bool) -> std::io::Result<()> {
    for found in events {
        if json {
            serde_json::to_writer(&mut out, &Line::new(found))?;
            writeln!(out)?;
            continue;
        }
        let (event, module) = found;
        let fields: Vec<String> = event.fields.iter().map(declared).collect();
        let module = module.as_ref().map_or_else(String::new, |module| format!(" [{module}]"));
        let only = if has_only_arguments(event) { format!("\t{ONLY}") } else { String::new() };
        writeln!(out, "{}{module}\t{}{only}", event.full_name(), fields.join(", "))?;
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
