//! The table: its rows and columns.

use parquet::data_type::ByteArray;
use rustc_hash::FxHashMap;

use crate::convert::calls::Tracers;
use crate::convert::ground::Names;
use crate::stream::Context;

/// No name, no text.
pub(super) const NONE: u32 = u32::MAX;
/// What a text takes beside its bytes, which are there twice.
const TEXT: usize = 120;

/// What a row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Call,
    Entry,
    Return,
    Jump,
    Event,
    Loss,
    Mark,
    Count,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It is none, or has none.
    Nothing,
    Return,
    Jump,
    Uncertain,
    Unseen,
}

const KINDS: [&str; 8] = ["call", "entry", "return", "jump", "event", "loss", "mark", "count"];
const ENDS: [&str; 5] = ["", "return", "jump", "uncertain", "unseen"];

/// A row. Numbers below zero are none; names are numbers of [`Names`], texts those of [`Texts`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) kind: Kind,
    pub(super) end: End,
    pub(super) tracer: u16,
    pub(super) start: i64,
    pub(super) stop: i64,
    pub(super) duration: i64,
    pub(super) own: i64,
    pub(super) vcpu: i64,
    pub(super) stop_vcpu: i64,
    pub(super) pid: i64,
    pub(super) tgid: i64,
    pub(super) depth: i64,
    pub(super) call: i64,
    pub(super) parent: i64,
    pub(super) count: i64,
    pub(super) function: u32,
    pub(super) caller: u32,
    pub(super) target: u32,
    pub(super) comm: u32,
    pub(super) args: u32,
    pub(super) value: u32,
    pub(super) mark: u32,
    pub(super) text: u32,
    pub(super) context: Option<Context>,
    pub(super) stop_context: Option<Context>,
}

impl Row {
    /// One of which nothing else is known.
    pub(super) fn new(kind: Kind) -> Self {
        Self {
            kind,
            end: End::Nothing,
            tracer: 0,
            start: 0,
            stop: -1,
            duration: -1,
            own: -1,
            vcpu: -1,
            stop_vcpu: -1,
            pid: -1,
            tgid: -1,
            depth: -1,
            call: -1,
            parent: -1,
            count: -1,
            function: NONE,
            caller: NONE,
            target: NONE,
            comm: NONE,
            args: NONE,
            value: NONE,
            mark: NONE,
            text: NONE,
            context: None,
            stop_context: None,
        }
    }
}

/// A number as the table has them: readers do sums with signed ones.
pub(super) fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Texts of a group, each once.
#[derive(Debug, Default)]
pub(super) struct Texts {
    known: FxHashMap<Box<[u8]>, u32>,
    texts: Vec<ByteArray>,
    bytes: usize,
}

impl Texts {
    /// The number of a text.
    pub(super) fn optional<T: AsRef<[u8]> + ?Sized>(&mut self, text: Option<&T>) -> u32 {
        let Some(text) = text.map(AsRef::as_ref) else { return NONE };
        if let Some(known) = self.known.get(text) {
            return *known;
        }
        let number = u32::try_from(self.texts.len()).unwrap_or(NONE);
        self.known.insert(text.into(), number);
        self.texts.push(ByteArray::from(text));
        self.bytes += 2 * text.len() + TEXT;
        number
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A symbol and its module, if it has one.
#[derive(Debug)]
struct Label(ByteArray, Option<ByteArray>);

/// What the rows of all groups refer to, as the library takes it.
#[derive(Debug, Default)]
pub(super) struct Labels {
    names: Vec<Label>,
    tracers: Vec<ByteArray>,
    kinds: Vec<ByteArray>,
    ends: Vec<ByteArray>,
}

impl Labels {
    pub(super) fn new() -> Self {
        let all = |texts: &[&str]| texts.iter().map(|text| ByteArray::from(*text)).collect();
        Self { kinds: all(&KINDS), ends: all(&ENDS), ..Self::default() }
    }

    /// Takes what is new.
    pub(super) fn learn(&mut self, names: &Names, tracers: &Tracers) {
        self.names.extend(names.iter().skip(self.names.len()).map(|name| match &name.symbol {
            Some((symbol, module)) => {
                let module = Some(&**module).filter(|module| !module.is_empty());
                Label(ByteArray::from(&**symbol), module.map(ByteArray::from))
            }
            None => Label(ByteArray::from(&*format!("{:#x}", name.address)), None),
        }));
        while let Some(name) =
            u16::try_from(self.tracers.len() + 1).ok().and_then(|it| tracers.name(it))
        {
            self.tracers.push(ByteArray::from(name));
        }
    }

    /// What a number of a column stands for; nothing if that is nothing.
    pub(super) fn get(&self, of: Of, number: u32, texts: &Texts) -> Option<ByteArray> {
        let place = usize::try_from(number).ok().filter(|_| number != NONE)?;
        match of {
            Of::Kinds => self.kinds.get(place).cloned(),
            Of::Ends => self.ends.get(place).cloned(),
            Of::Symbols => Some(self.names.get(place)?.0.clone()),
            Of::Modules => self.names.get(place)?.1.clone(),
            Of::Tracers => self.tracers.get(place).cloned(),
            Of::Texts | Of::Json => texts.texts.get(place).cloned(),
            Of::Contexts => {
                let [flags, depths] = u16::try_from(number).ok()?.to_le_bytes();
                Some(ByteArray::from(&Context { flags, depths }.columns()[..]))
            }
        }
    }
}

/// What the numbers of a column of texts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Of {
    Kinds,
    Ends,
    Symbols,
    Modules,
    Tracers,
    Texts,
    /// Texts that are JSON.
    Json,
    /// The bytes of a [`Context`].
    Contexts,
}

/// What a column has of each of these rows, put behind what there is; zero or more, or less than zero for none.
type Longs = fn(&[Row], &mut Vec<i64>);
/// The same; [`NONE`] for none.
type Shorts = fn(&[Row], &mut Vec<u32>);

/// What cells of a column are.
pub(super) enum Value {
    /// 64 bits, sorted or nearly so.
    Time(Longs),
    /// 64 bits.
    Long(Longs),
    /// 32 bits without a sign. (No number of the kernel's is so large as [`NONE`].)
    Short(Shorts),
    Text(Of, Shorts),
}

/// A column of all tables.
pub(super) struct Column {
    pub(super) name: &'static str,
    pub(super) value: Value,
    pub(super) required: bool,
}

const fn column(name: &'static str, value: Value) -> Column {
    Column { name, value, required: false }
}

/// Fills a column with what it has of rows, in one loop.
macro_rules! cells {
    ($row:ident: $cell:expr) => {
        |rows, cells| cells.extend(rows.iter().map(|$row| $cell))
    };
}

fn short(number: i64) -> u32 {
    u32::try_from(number).unwrap_or(NONE)
}

fn context(context: Option<Context>) -> u32 {
    context.map_or(NONE, |it| u16::from_le_bytes([it.flags, it.depths]).into())
}

/// In this order; docs/convert.md says what they mean.
pub(super) const COLUMNS: [Column; 28] = [
    Column {
        name: "kind",
        value: Value::Text(Of::Kinds, cells!(row: row.kind as u32)),
        required: true,
    },
    Column { name: START, value: Value::Time(cells!(row: row.start)), required: true },
    column("end_ns", Value::Time(cells!(row: row.stop))),
    column("duration_ns", Value::Long(cells!(row: row.duration))),
    column("self_ns", Value::Long(cells!(row: row.own))),
    column(VCPU, Value::Short(cells!(row: short(row.vcpu)))),
    column("end_vcpu", Value::Short(cells!(row: short(row.stop_vcpu)))),
    column("pid", Value::Short(cells!(row: short(row.pid)))),
    column("tgid", Value::Short(cells!(row: short(row.tgid)))),
    column("comm", Value::Text(Of::Texts, cells!(row: row.comm))),
    column("function", Value::Text(Of::Symbols, cells!(row: row.function))),
    column("module", Value::Text(Of::Modules, cells!(row: row.function))),
    column("caller", Value::Text(Of::Symbols, cells!(row: row.caller))),
    column("caller_module", Value::Text(Of::Modules, cells!(row: row.caller))),
    // Zero is none.
    column("tracer", Value::Text(Of::Tracers, cells!(row: u32::from(row.tracer).wrapping_sub(1)))),
    column("depth", Value::Short(cells!(row: short(row.depth)))),
    column(CALL, Value::Time(cells!(row: row.call))),
    column("parent_id", Value::Time(cells!(row: row.parent))),
    column(
        "ended",
        Value::Text(
            Of::Ends,
            cells!(row: match row.end {
                End::Nothing => NONE,
                end => end as u32,
            }),
        ),
    ),
    column("target", Value::Text(Of::Symbols, cells!(row: row.target))),
    column("target_module", Value::Text(Of::Modules, cells!(row: row.target))),
    column("args", Value::Text(Of::Json, cells!(row: row.args))),
    column("value", Value::Text(Of::Json, cells!(row: row.value))),
    column("count", Value::Long(cells!(row: row.count))),
    column("mark", Value::Text(Of::Texts, cells!(row: row.mark))),
    column("text", Value::Text(Of::Texts, cells!(row: row.text))),
    column("context", Value::Text(Of::Contexts, cells!(row: context(row.context)))),
    column("end_context", Value::Text(Of::Contexts, cells!(row: context(row.stop_context)))),
];

/// What rows are sorted by, and its place.
pub(super) const START: &str = "start_ns";
pub(super) const START_INDEX: i32 = 1;
/// What rows of one time are sorted by.
pub(super) const CALL: &str = "call_id";
/// The column that directories stand for.
const VCPU: &str = "vcpu";

impl Column {
    /// Whether tables have it.
    pub(super) fn is_in(&self, with_vcpu: bool) -> bool {
        with_vcpu || self.name != VCPU
    }
}

/// What the library has to know of a column beside its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// Numbers that are sorted or nearly so.
    Rising,
    /// Numbers.
    Numbers,
    /// Numbers of which there are few.
    Few,
    /// Texts of which a group has most, so that the least and the greatest tell nothing.
    Texts,
}

pub(super) fn styles() -> impl Iterator<Item = (&'static str, Style)> {
    COLUMNS.iter().map(|column| match column.value {
        Value::Time(_) => (column.name, Style::Rising),
        Value::Long(_) => (column.name, Style::Numbers),
        Value::Short(_) => (column.name, Style::Few),
        // By the kind losses and marks are found.
        Value::Text(..) if column.required => (column.name, Style::Few),
        Value::Text(..) => (column.name, Style::Texts),
    })
}

/// The table in the language of Parquet's schemas.
pub(super) fn schema(with_vcpu: bool) -> String {
    let columns = COLUMNS.iter().filter(|column| column.is_in(with_vcpu)).map(|column| {
        let need = if column.required { "REQUIRED" } else { "OPTIONAL" };
        let (kind, means) = match column.value {
            Value::Time(_) | Value::Long(_) => ("INT64", ""),
            Value::Short(_) => ("INT32", " (INTEGER(32,false))"),
            Value::Text(Of::Json, _) => ("BYTE_ARRAY", " (JSON)"),
            Value::Text(..) => ("BYTE_ARRAY", " (UTF8)"),
        };
        format!("{need} {kind} {}{means};", column.name)
    });
    format!("message trace {{ {} }}", columns.collect::<String>())
}
