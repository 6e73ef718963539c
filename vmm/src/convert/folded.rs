//! Folded stacks, the input of flame graphs: a line for each stack, with the nanoseconds that its
//! innermost function itself took, or, in a trace without returns, with how often it was entered.

use std::fs::File;
use std::io::{self, BufWriter, Write};

use rustc_hash::FxHashMap;

use super::calls::{Calls, Lane};
use super::ground::{Names, too_many};
use crate::export::{Entry, Event, Export, Name, Return};
use crate::stream::{Header, Summary};

/// Most different stacks.
const STACKS: usize = 1 << 22;

/// Folded stacks.
#[derive(Debug)]
pub struct Folded {
    out: BufWriter<File>,
    names: Names,
    /// Names of tasks and tracers.
    roots: FxHashMap<String, u32>,
    calls: Calls<Call>,
    tree: Vec<Node>,
    children: FxHashMap<(u32, u32), u32>,
    durations: bool,
}

#[derive(Debug)]
struct Call {
    node: u32,
    /// What was called took so long.
    inside: u64,
}

/// A stack: that of its parent, and one more.
#[derive(Debug)]
struct Node {
    parent: u32,
    /// The number of a function, or of a root.
    name: u32,
    entered: u64,
    ns: u64,
}

const ROOT: u32 = u32::MAX;

impl Folded {
    /// Writes to `out`, at the end.
    #[must_use]
    pub fn new(out: File) -> Self {
        Self {
            out: BufWriter::new(out),
            names: Names::new(),
            roots: FxHashMap::default(),
            calls: Calls::new(),
            tree: Vec::new(),
            children: FxHashMap::default(),
            durations: false,
        }
    }

    fn root(&mut self, pid: u32, comm: Option<&str>, tracer: Option<&str>) -> io::Result<u32> {
        let comm = comm.unwrap_or(if pid == 0 { "<idle>" } else { "<...>" });
        let number = match tracer {
            None => self.roots.get(comm).copied(),
            Some(_) => None,
        };
        let number = number.unwrap_or_else(|| {
            let name = match tracer {
                None => comm.to_owned(),
                Some(tracer) => format!("{tracer};{comm}"),
            };
            let next = u32::try_from(self.roots.len()).unwrap_or(u32::MAX);
            *self.roots.entry(name).or_insert(next)
        });
        self.child(ROOT, number)
    }

    fn child(&mut self, parent: u32, name: u32) -> io::Result<u32> {
        if let Some(child) = self.children.get(&(parent, name)) {
            return Ok(*child);
        }
        if self.tree.len() >= STACKS {
            return Err(too_many("stacks"));
        }
        let number = u32::try_from(self.tree.len()).unwrap_or(u32::MAX);
        self.tree.push(Node { parent, name, entered: 0, ns: 0 });
        self.children.insert((parent, name), number);
        Ok(number)
    }

    fn call(&mut self, parent: u32, name: &Name<'_>) -> io::Result<u32> {
        let number = self.names.number(name).ok_or_else(|| too_many("addresses"))?.number;
        self.child(parent, number)
    }

    fn node(&mut self, number: u32) -> Option<&mut Node> {
        self.tree.get_mut(usize::try_from(number).ok()?)
    }

    fn entry(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        let lane = Lane::new(entry.vcpu, entry.pid, tracer(entry.tracer));
        let around = match entry.place {
            Some(_) => self.calls.top(lane).map(|call| call.node),
            None => None,
        };
        let around = match around {
            Some(node) => node,
            None => self.root(entry.pid, entry.comm, entry.tracer)?,
        };
        let around = match (&entry.caller, entry.place) {
            // All that is known of a stack.
            (Some(caller), None) if caller.symbol.is_some() => self.caller(around, caller)?,
            _ => around,
        };
        let node = self.call(around, &entry.function)?;
        if let Some(known) = self.node(node) {
            known.entered += 1;
        }
        if let Some(place) = entry.place
            && !self.calls.enter(lane, place.frame, Call { node, inside: 0 })
        {
            return Err(too_many("tasks"));
        }
        Ok(())
    }

    /// A caller by its name: it has as many addresses as it calls functions from.
    fn caller(&mut self, around: u32, caller: &Name<'_>) -> io::Result<u32> {
        let hash = caller.symbol.map_or(0, |(symbol, module)| {
            let bytes = symbol.bytes().chain(module.bytes());
            bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            })
        });
        // Not in the range of kernel text, so that it is no function's address.
        self.call(around, &Name { address: hash >> 1, ..*caller })
    }

    fn ret(&mut self, ret: &Return<'_>) -> io::Result<()> {
        if let Some(ns) = ret.duration_ns.filter(|_| ret.whole) {
            // What is around it is not known.
            let root = self.root(ret.pid, ret.comm, ret.tracer)?;
            let node = self.call(root, &ret.function)?;
            self.durations = true;
            if let Some(node) = self.node(node) {
                node.entered += 1;
                node.ns = node.ns.saturating_add(ns);
            }
        } else {
            self.leave(ret);
        }
        Ok(())
    }

    fn leave(&mut self, ret: &Return<'_>) {
        let Some(frame) = ret.frame else { return };
        let lane = Lane::new(ret.vcpu, ret.pid, tracer(ret.tracer));
        let Some(call) = self.calls.leave(lane, frame).pop() else { return };
        let Some(duration) = ret.duration_ns else { return };
        self.durations = true;
        if let Some(node) = self.node(call.with.node) {
            let own = duration.saturating_sub(call.with.inside);
            node.ns = node.ns.saturating_add(own);
        }
        if let Some(around) = self.calls.top(lane) {
            around.inside = around.inside.saturating_add(duration);
        }
    }

    fn write(&mut self) -> io::Result<()> {
        let mut roots = vec![""; self.roots.len()];
        for (name, number) in &self.roots {
            if let Some(root) = usize::try_from(*number).ok().and_then(|it| roots.get_mut(it)) {
                *root = name;
            }
        }
        let mut stack = Vec::new();
        for node in &self.tree {
            let value = if self.durations { node.ns } else { node.entered };
            if value == 0 {
                continue;
            }
            stack.clear();
            let mut at = Some(node);
            while let Some(node) = at {
                let known = usize::try_from(node.name).unwrap_or(usize::MAX);
                if node.parent == ROOT {
                    stack.push(roots.get(known).map_or(String::new(), |root| clean(root, true)));
                } else if let Some(known) = self.names.get(node.name) {
                    let symbol = known.symbol.as_ref();
                    let symbol = symbol.map(|(symbol, module)| (&**symbol, &**module));
                    stack.push(clean(
                        &Name { address: known.address, symbol, number: None }.label(),
                        false,
                    ));
                }
                at = usize::try_from(node.parent).ok().and_then(|parent| self.tree.get(parent));
            }
            stack.reverse();
            writeln!(self.out, "{} {value}", stack.join(";"))?;
        }
        self.out.flush()
    }
}

/// Semicolons end a name.
fn clean(name: &str, root: bool) -> String {
    match name.split_once(';').filter(|_| root) {
        // A tracer, and the task.
        Some((tracer, comm)) => format!("{tracer};{}", comm.replace(';', ":")),
        None => name.replace(';', ":"),
    }
}

fn tracer(name: Option<&str>) -> u16 {
    // Calls of different tracers must not nest; that they are told apart by this is likely enough.
    name.map_or(0, |name| {
        name.bytes().fold(1, |hash: u16, byte| hash.wrapping_mul(31) ^ u16::from(byte))
    })
}

impl Export for Folded {
    fn begin(&mut self, _: &Header) -> io::Result<()> {
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => self.entry(entry)?,
            Event::Return(ret) => self.ret(ret)?,
            Event::Unfinished(left) => {
                let lane = Lane::new(left.vcpu, left.pid, tracer(left.tracer));
                self.calls.forget(lane, left.place.frame);
            }
            // Not of a stack.
            Event::Tail(_) | Event::Tracepoint(_) | Event::Loss(_) | Event::Mark(_) => {}
        }
        Ok(())
    }

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        self.write()
    }
}
