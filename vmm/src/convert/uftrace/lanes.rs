//! Records of tasks, a file for each. There may be more files than a process may have open.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustc_hash::FxHashMap;

use super::super::calls::Lane;

/// Written when a task has so much, or all have.
const OF_ONE: usize = 1 << 16;
const OF_ALL: usize = 1 << 26;

/// Pids of Linux are lower; from here on are those of tasks that have none of their own.
pub(super) const PIDS: u32 = 1 << 22;

/// A kind of record, as its lowest bits: type, and whether data follows.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Entry = 0,
    Exit = 1,
    Event = 3,
    EventWithData = 7,
}

/// Whose record it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Who<'a> {
    pub(super) vcpu: u32,
    pub(super) pid: u32,
    pub(super) tgid: Option<u32>,
    pub(super) comm: Option<&'a str>,
    pub(super) tracer: Option<&'a str>,
}

#[derive(Debug)]
pub(super) struct Task {
    pub(super) tid: u32,
    /// The process.
    pub(super) pid: u32,
    /// Its last name.
    comm: Option<Box<str>>,
    tracer: Option<Box<str>>,
    vcpu: Option<u32>,
    idle: bool,
    data: Vec<u8>,
}

impl Task {
    /// How it is called.
    pub(super) fn name(&self) -> String {
        let name = match &self.comm {
            _ if self.idle => format!("swapper/{}", self.vcpu.unwrap_or(0)),
            Some(comm) => comm.to_string(),
            None => "<...>".to_owned(),
        };
        match &self.tracer {
            Some(tracer) => format!("{name} ({tracer})"),
            None => name,
        }
    }
}

/// All tasks, for each tracer.
#[derive(Debug)]
pub(super) struct Lanes {
    folder: PathBuf,
    tasks: FxHashMap<Lane, Task>,
    /// Bytes in memory.
    held: usize,
    made_up: u32,
}

impl Lanes {
    pub(super) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), tasks: FxHashMap::default(), held: 0, made_up: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Tasks by their number.
    pub(super) fn sorted(&self) -> Vec<&Task> {
        let mut tasks: Vec<_> = self.tasks.values().collect();
        tasks.sort_by_key(|task| task.tid);
        tasks
    }

    /// Learns of a task. Returns whether it was on another vCPU before, or nowhere.
    pub(super) fn see(&mut self, lane: Lane, who: Who<'_>) -> io::Result<bool> {
        if !self.tasks.contains_key(&lane) {
            if self.tasks.len() >= 1 << 20 {
                return Err(super::too_many("tasks"));
            }
            let ours = who.tracer.is_none() && (1..PIDS).contains(&who.pid);
            let tid = if ours {
                who.pid
            } else {
                self.made_up += 1;
                PIDS + self.made_up - 1
            };
            let process = who.tgid.filter(|pid| ours && (1..PIDS).contains(pid));
            let task = Task {
                tid,
                pid: process.unwrap_or(tid),
                comm: None,
                tracer: who.tracer.map(Into::into),
                vcpu: None,
                idle: who.pid == 0,
                data: Vec::new(),
            };
            self.tasks.insert(lane, task);
        }
        let Some(task) = self.tasks.get_mut(&lane) else { return Ok(false) };
        if let Some(comm) = who.comm
            && task.comm.as_deref() != Some(comm)
        {
            task.comm = Some(comm.into());
        }
        Ok(task.vcpu.replace(who.vcpu) != Some(who.vcpu))
    }

    pub(super) fn record(
        &mut self,
        lane: Lane,
        at: u64,
        kind: Kind,
        depth: u32,
        address: u64,
    ) -> io::Result<()> {
        const MAGIC: u64 = 5 << 3;
        let word = kind as u64 | MAGIC | u64::from(depth) << 6 | address << 16;
        let mut record = [0; 16];
        record[..8].copy_from_slice(&at.to_le_bytes());
        record[8..].copy_from_slice(&word.to_le_bytes());
        self.write(lane, &record)
    }

    /// What belongs to the last record: a length of 16 bits, the bytes, and zeros up to a multiple
    /// of 8.
    pub(super) fn data(&mut self, lane: Lane, bytes: &[u8; 4]) -> io::Result<()> {
        let [a, b, c, d] = *bytes;
        self.write(lane, &[4, 0, a, b, c, d, 0, 0])
    }

    fn write(&mut self, lane: Lane, bytes: &[u8]) -> io::Result<()> {
        let Some(task) = self.tasks.get_mut(&lane) else { return Ok(()) };
        task.data.extend_from_slice(bytes);
        self.held += bytes.len();
        if task.data.len() >= OF_ONE {
            self.held -= task.data.len();
            append(&self.folder, task)?;
        }
        if self.held >= OF_ALL { self.flush() } else { Ok(()) }
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.held = 0;
        self.tasks.values_mut().try_for_each(|task| {
            append(&self.folder, task)?;
            task.data = Vec::new();
            Ok(())
        })
    }
}

fn append(folder: &Path, task: &mut Task) -> io::Result<()> {
    if task.data.is_empty() {
        return Ok(());
    }
    let path = folder.join(format!("{}.dat", task.tid));
    OpenOptions::new().create(true).append(true).open(path)?.write_all(&task.data)?;
    task.data.clear();
    Ok(())
}
