//! Makes an event: what its program records, and what becomes of that.

use super::block;
use super::table::{Row, Rule};
use crate::kernel::Kernel;
use crate::kernel::arguments::{Fetch, Last as Behind, ModuleTypes, Source, Value};
use crate::kernel::tracepoints::EventField;
use crate::relay::{EventFields, EventValue, From, Part};
use crate::session::values::{ROOM, shorten, taken, whole};
use crate::stream::{Shape, ValueField};
use crate::tracer::TaskOffsets;
use vmtrace_trampolines::{Field, Last, Read};

/// What an event is made of.
pub(super) struct Made<'a> {
    kernel: &'a Kernel,
    /// The name of its tracepoint.
    point: &'a str,
    pub(super) fields: Vec<Field>,
    pub(super) values: Vec<EventValue>,
}

impl<'a> Made<'a> {
    pub(super) fn new(kernel: &'a Kernel, point: &'a str) -> Self {
        Self { kernel, point, fields: Vec::new(), values: Vec::new() }
    }

    /// What an event of this name records and shows.
    pub(super) fn fields(self, name: String, print: Option<String>) -> EventFields {
        let Self { mut fields, values, .. } = self;
        if fields.iter().any(|field| matches!(field, Field::Read(_))) {
            fields.push(Field::Failed);
        }
        let (call, in_place) = (None, false);
        EventFields { name, fields, values, print, call, in_place }
    }

    /// All that its probes are called with, by its types; `module` has those of its module, if it is
    /// of one.
    pub(super) fn by_types(&mut self, module: Option<&ModuleTypes>) -> Result<(), String> {
        let prototype = self.kernel.tracepoint_prototype(self.point, module);
        let prototype = prototype.map_err(|why| format!("its arguments are not known: {why}"))?;
        let mut all: Vec<_> = prototype.parameters.iter().flat_map(taken).collect();
        shorten(&mut all);
        for one in all {
            let part = Part { field: self.field(one.field), shape: one.shown.shape.clone() };
            self.values.push(EventValue { shown: one.shown, from: From::Same(part) });
        }
        Ok(())
    }

    /// A field of its format; whether it is known what that is.
    pub(super) fn by_row(&mut self, row: &Row, field: &EventField) -> bool {
        let rules = row.rules.iter().filter(|(name, _)| *name == field.name);
        for (_, rule) in rules {
            let (fields, values) = (self.fields.len(), self.values.len());
            if let Some((from, text)) = self.rule(rule, field)
                && let Some(shape) = shape(field, text)
                && from.words().is_none_or(|words| words == shape.words())
                && self.has_room(&shape)
            {
                let shown = ValueField { name: field.name.clone(), shape };
                self.values.push(EventValue { shown, from });
                let words: usize = self.fields.iter().map(|field| field.words()).sum();
                if words <= ROOM {
                    return true;
                }
            }
            self.fields.truncate(fields);
            self.values.truncate(values);
        }
        false
    }

    /// Whether records have room for one more value: what an image says of its events may be anything.
    fn has_room(&self, shape: &Shape) -> bool {
        /// Words of a value, and of all of them together, which the stream has room for.
        const ONE: std::ops::RangeInclusive<usize> = 1..=32;
        const ALL: usize = 128;
        let before: usize = self.values.iter().map(|value| value.shown.shape.words()).sum();
        ONE.contains(&shape.words()) && before + shape.words() <= ALL
    }

    /// What a rule says, with the longest text that it is.
    fn rule(&mut self, rule: &Rule, field: &EventField) -> Option<(From, Option<u16>)> {
        Some(match rule {
            Rule::Path(path) => same(self.part(path, false)?),
            Rule::Known(path) => same(self.part(path, true)?),
            Rule::Linked(path) => same(self.linked(path)?),
            Rule::SwitchState([preempted, task, exited]) => {
                let parts =
                    [self.part(preempted, true)?, self.part(task, true)?, self.part(exited, true)?];
                (From::SwitchState(parts), None)
            }
            Rule::Swapped(path) => (From::Swapped(self.part(path, false)?), None),
            Rule::Pointed(pointer, member, numbers) => {
                let pointer = self.part(pointer, true)?;
                (From::Pointed(pointer, self.part(member, false)?, *numbers), None)
            }
            Rule::Disk(path) => {
                let mut member = |name| self.linked(&format!("{path}->{name}"));
                (From::Disk([member("major")?, member("first_minor")?]), None)
            }
            Rule::Request { value, shift, flags } => {
                let untold = match flags {
                    Some(flags) => Some((self.linked(flags)?, block::passed_through(self.kernel))),
                    None => None,
                };
                (From::Request { value: self.linked(value)?, shift: *shift, untold }, None)
            }
            Rule::Letters(path) => {
                let letters = block::letters(self.kernel, field.size)?;
                (From::Letters(self.linked(path)?, letters), None)
            }
            Rule::Errno(path) => {
                let part = self.part(path, true)?;
                let from = match part.shape {
                    // `blk_status_t`; an error number before 5.16.
                    Shape::Unsigned { bytes: 1 } => From::Listed(part, block::errors(self.kernel)?),
                    _ => From::Same(part),
                };
                (from, None)
            }
            Rule::Accounted(flags, cache) => (self.accounted(flags, cache)?, None),
            Rule::Page(path) => {
                let array = self.kernel.page_array()?;
                let page = self.part(path, true)?;
                let variables = array.variables.iter().map(|&at| self.variable(at));
                (From::Page(page, variables.collect::<Option<_>>()?, array.clone()), None)
            }
            Rule::Line(text, len) => {
                let text = self.part(text, false)?;
                let Shape::Text { bytes } = text.shape else { return None };
                (From::Line(text, self.part(len, true)?), Some(bytes))
            }
            Rule::Own => {
                let offset = TaskOffsets::find(self.kernel).ok()?.comm;
                // As programs of riscv64 read it.
                let offset =
                    u32::try_from(offset).ok().filter(|offset| offset.is_multiple_of(8))?;
                let field = self.field(Field::Task { offset, words: 2 });
                same(Part { field, shape: Shape::Text { bytes: 16 } })
            }
            Rule::OwnPid => (From::Pid, None),
            Rule::Empty => (From::Always(0), Some(8)),
            Rule::Variable(name) => same(self.variable(self.kernel.symbols().address(name)?)?),
            Rule::Always(number) => (From::Always(*number), None),
            Rule::Each(paths) => {
                let parts = paths.iter().map(|path| self.part(path, true));
                (From::Each(parts.collect::<Option<_>>()?), None)
            }
        })
    }

    /// Whether memory is counted for a group of tasks: by the flags of a request, or by its cache.
    fn accounted(&mut self, flags: &str, cache: &str) -> Option<From> {
        let btf = self.kernel.btf().ok()?;
        // `CONFIG_MEMCG`
        if btf.struct_size("mem_cgroup").is_none() {
            return Some(From::Always(0));
        }
        // Numbers of macros, before there were these enums (6.9 and 6.10), which have the second of them in any case.
        let of = |name, another, old| match block::bit(self.kernel, name) {
            None if block::bit(self.kernel, another).is_none() => Some(old),
            found => found,
        };
        let wanted = of("___GFP_ACCOUNT_BIT", "___GFP_DMA_BIT", 0x40_0000)?;
        let counted = of("_SLAB_ACCOUNT", "_SLAB_POISON", 0x0400_0000)?;
        Some(From::Any(vec![(self.part(flags, true)?, wanted), (self.part(cache, true)?, counted)]))
    }

    /// The value of a path; if it is `known` that all pointers on it lead where they should.
    fn part(&mut self, path: &str, known: bool) -> Option<Part> {
        self.part_by(path, known, if known { Field::Known } else { Field::Read })
    }

    /// The value of a path, or 0 if a pointer on it is NULL; all others lead where they should.
    fn linked(&mut self, path: &str) -> Option<Part> {
        self.part_by(path, true, Field::Linked)
    }

    fn part_by(&mut self, path: &str, known: bool, by: fn(Read) -> Field) -> Option<Part> {
        let value = self.kernel.tracepoint_path(self.point, path).ok()?;
        let Value { fetch, shape, .. } = value;
        let (field, shape) = match fetch {
            Fetch::Argument(number) => (Field::Argument(number), whole(shape)),
            Fetch::Memory { from: Source::Argument(number), hops, last } => {
                let words = |bytes: u8| bytes.div_ceil(8);
                let (last, shape) = match last {
                    Behind::Word { offset, .. } => (Last::Words { offset, words: 1 }, whole(shape)),
                    Behind::Text { offset, max } => {
                        let shape = Shape::Text { bytes: max.into() };
                        let words = words(max);
                        // All of an array, which has its end in it.
                        let all = Last::Words { offset, words };
                        (if known { all } else { Last::Text { offset, words } }, shape)
                    }
                    Behind::Bytes { .. } => return None,
                };
                let read = Read::new(number, &hops, last)?;
                (by(read), shape)
            }
            Fetch::Words(_) | Fetch::Result | Fetch::Memory { .. } => return None,
        };
        Some(Part { field: self.field(field), shape })
    }

    /// A variable of 8 bytes at a link address.
    fn variable(&mut self, address: u64) -> Option<Part> {
        let field = address.is_multiple_of(8).then_some(Field::Variable(address))?;
        Some(Part { field: self.field(field), shape: Shape::Unsigned { bytes: 8 } })
    }

    /// The place of a field, which is added if it is not there.
    fn field(&mut self, field: Field) -> usize {
        self.fields.iter().position(|known| *known == field).unwrap_or_else(|| {
            self.fields.push(field);
            self.fields.len() - 1
        })
    }
}

/// As it was recorded, with the longest text that it is.
fn same(part: Part) -> (From, Option<u16>) {
    let text = match part.shape {
        Shape::Text { bytes } => Some(bytes),
        _ => None,
    };
    (From::Same(part), text)
}

/// What a field is, by its format; `text` is the longest that it can be.
pub(super) fn shape(field: &EventField, text: Option<u16>) -> Option<Shape> {
    let (kind, bytes) = (&*field.kind, u8::try_from(field.size).ok());
    let bytes = bytes.filter(|bytes| matches!(bytes, 1 | 2 | 4 | 8));
    Some(match kind {
        _ if kind.starts_with("__data_loc") => Shape::Text { bytes: text? },
        _ if kind.starts_with("char[") => Shape::Text { bytes: u16::try_from(field.size).ok()? },
        _ if kind.starts_with("unsigned long[") => {
            Shape::Words { bytes: u16::try_from(field.size).ok()? }
        }
        _ if kind.contains('[') => return None,
        _ if kind.ends_with('*') => Shape::Pointer,
        "bool" => Shape::Bool { bytes: bytes? },
        _ if field.signed => Shape::Signed { bytes: bytes? },
        _ => Shape::Unsigned { bytes: bytes? },
    })
}
