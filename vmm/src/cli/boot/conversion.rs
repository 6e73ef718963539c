//! A trace for another tool (`-o trace.dat`): the run writes the stream to a file beside it, which is
//! converted when the run is over.
//!
//! The process that runs the guest can make no files by then, nor start programs (docs/security.md): a
//! process of its own waits for the end from the beginning on.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};

use super::Args;
use crate::cli::convert::{DONE, GO};
use crate::convert::Format;
use crate::emulated::THIS_PROGRAM;

/// Who converts.
pub(super) struct Conversion {
    stream: PathBuf,
    place: PathBuf,
    tell: ChildStdin,
    answer: ChildStdout,
}

impl Conversion {
    /// Lets the run write a stream beside the output where that is to be of another format, by its
    /// name: `None` where it is a stream itself.
    ///
    /// # Errors
    /// When that cannot be.
    pub(super) fn prepare(args: &mut Args) -> Result<Option<Self>> {
        let format = args.output.as_deref().and_then(Format::of);
        let (Some(place), Some(format)) = (args.output.clone(), format) else { return Ok(None) };
        let shown = place.display();
        if !format.is_file() && place.exists() && !place.is_dir() {
            bail!("-o {shown}: {} is a directory, and there is a file of this name", format.name());
        }
        let stream = beside(&place).with_context(|| format!("-o {shown}"))?;
        let child = Command::new(THIS_PROGRAM)
            .args(["convert", "--once-told"])
            .arg(&stream)
            .arg("-o")
            .arg(&place)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Signals of the terminal are for the run, which ends in order by them.
            .process_group(0)
            .spawn();
        let mut child = child.with_context(|| format!("-o {shown}: no process to convert it"))?;
        let (Some(tell), Some(answer)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("-o {shown}: no way to the process that converts");
        };
        args.output = Some(stream.clone());
        Ok(Some(Self { stream, place, tell, answer }))
    }

    /// Converts what was written.
    ///
    /// # Errors
    /// When that fails: the stream is there still, and the error says where.
    pub(super) fn finish(mut self) -> Result<()> {
        let mut answer = Vec::new();
        let told = self.tell.write_all(GO).and_then(|()| self.answer.read_to_end(&mut answer));
        if told.is_ok() && answer == DONE {
            return Ok(());
        }
        let (stream, place) = (self.stream.display(), self.place.display());
        bail!(
            "{place} was not written; the trace is in {stream}: vmtrace convert {stream} -o {place}"
        );
    }
}

/// A new file in the same directory.
fn beside(place: &Path) -> Result<PathBuf> {
    let name = place.file_name().context("this is no name of a file")?.to_string_lossy();
    let parent = place.parent().filter(|parent| !parent.as_os_str().is_empty());
    let file = tempfile::Builder::new()
        .prefix(&format!("{name}."))
        .suffix(".vmt")
        .tempfile_in(parent.unwrap_or(Path::new(".")))?;
    let (_, path) = file.keep()?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::boot::tests::args;

    // Who has always written streams to names of any kind still does.
    #[test]
    fn only_names_of_other_formats_are_converted() {
        for name in ["trace", "t.vmt", "/dev/null", "trace.dat.vmt", "x.vmtrace"] {
            let mut args = args(&format!("-o {name}")).unwrap();
            assert!(Conversion::prepare(&mut args).unwrap().is_none(), "{name}");
            assert_eq!(args.output.as_deref(), Some(Path::new(name)));
        }
        let directory = tempfile::tempdir().unwrap();
        let taken = directory.path().join("t.ctf");
        std::fs::write(&taken, "").unwrap();
        let mut args = args(&format!("-o {}", taken.display())).unwrap();
        assert!(Conversion::prepare(&mut args).is_err(), "a file where a directory is to be");
    }
}
