//! The table: its rows and columns, and how a row group is written.

use std::fs::File;
use std::io;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use bytes::Bytes;
use parquet::column::writer::{ColumnCloseResult, get_column_writer, get_typed_column_writer};
use parquet::data_type::{ByteArray, ByteArrayType, DataType, Int32Type, Int64Type};
use parquet::file::properties::WriterPropertiesPtr;
use parquet::file::writer::{SerializedFileWriter, SerializedPageWriter, TrackedWrite};
use parquet::schema::types::ColumnDescPtr;
use rustc_hash::FxHashMap;

use crate::convert::calls::Tracers;
use crate::convert::ground::Names;
use crate::stream::Context;

/// No name, no text.
pub(super) const NONE: u32 = u32::MAX;
/// Rows that go to the library at a time.
const BATCH: usize = 4096;
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

    fn get(&self, number: u32) -> Option<&ByteArray> {
        self.texts.get(usize::try_from(number).ok()?)
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

    fn name(&self, number: u32) -> Option<&Label> {
        self.names.get(usize::try_from(number).ok()?)
    }

    fn symbol(&self, number: u32) -> Option<ByteArray> {
        Some(self.name(number)?.0.clone())
    }

    fn module(&self, number: u32) -> Option<ByteArray> {
        self.name(number)?.1.clone()
    }
}

/// What a column has of a row.
type Text = fn(&Row, &Labels, &Texts) -> Option<ByteArray>;

enum Value {
    /// 64 bits, sorted or nearly so.
    Time(fn(&Row) -> i64),
    /// 64 bits.
    Long(fn(&Row) -> i64),
    /// 32 bits without a sign.
    Short(fn(&Row) -> i64),
    Text(Text),
    /// Text that is JSON.
    Json(Text),
}

struct Column {
    name: &'static str,
    value: Value,
    required: bool,
}

const fn column(name: &'static str, value: Value) -> Column {
    Column { name, value, required: false }
}

fn context(context: Option<Context>) -> Option<ByteArray> {
    Some(ByteArray::from(&context?.columns()[..]))
}

/// In this order; docs/convert.md says what they mean.
const COLUMNS: [Column; 28] = [
    Column {
        name: "kind",
        value: Value::Text(|row, labels, _| labels.kinds.get(row.kind as usize).cloned()),
        required: true,
    },
    Column { name: START, value: Value::Time(|row| row.start), required: true },
    column("end_ns", Value::Time(|row| row.stop)),
    column("duration_ns", Value::Long(|row| row.duration)),
    column("self_ns", Value::Long(|row| row.own)),
    column("vcpu", Value::Short(|row| row.vcpu)),
    column("end_vcpu", Value::Short(|row| row.stop_vcpu)),
    column("pid", Value::Short(|row| row.pid)),
    column("tgid", Value::Short(|row| row.tgid)),
    column("comm", Value::Text(|row, _, texts| texts.get(row.comm).cloned())),
    column("function", Value::Text(|row, labels, _| labels.symbol(row.function))),
    column("module", Value::Text(|row, labels, _| labels.module(row.function))),
    column("caller", Value::Text(|row, labels, _| labels.symbol(row.caller))),
    column("caller_module", Value::Text(|row, labels, _| labels.module(row.caller))),
    column(
        "tracer",
        Value::Text(|row, labels, _| {
            labels.tracers.get(usize::from(row.tracer).checked_sub(1)?).cloned()
        }),
    ),
    column("depth", Value::Short(|row| row.depth)),
    column("call_id", Value::Time(|row| row.call)),
    column("parent_id", Value::Time(|row| row.parent)),
    column(
        "ended",
        Value::Text(|row, labels, _| match row.end {
            End::Nothing => None,
            end => labels.ends.get(end as usize).cloned(),
        }),
    ),
    column("target", Value::Text(|row, labels, _| labels.symbol(row.target))),
    column("target_module", Value::Text(|row, labels, _| labels.module(row.target))),
    column("args", Value::Json(|row, _, texts| texts.get(row.args).cloned())),
    column("value", Value::Json(|row, _, texts| texts.get(row.value).cloned())),
    column("count", Value::Long(|row| row.count)),
    column("mark", Value::Text(|row, _, texts| texts.get(row.mark).cloned())),
    column("text", Value::Text(|row, _, texts| texts.get(row.text).cloned())),
    column("context", Value::Text(|row, _, _| context(row.context))),
    column("end_context", Value::Text(|row, _, _| context(row.stop_context))),
];

/// What rows are sorted by, and its place.
pub(super) const START: &str = "start_ns";
pub(super) const START_INDEX: i32 = 1;
/// The column that directories stand for.
const VCPU: &str = "vcpu";

fn columns(with_vcpu: bool) -> impl Iterator<Item = &'static Column> {
    COLUMNS.iter().filter(move |column| with_vcpu || column.name != VCPU)
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
        Value::Text(_) if column.required => (column.name, Style::Few),
        Value::Text(_) | Value::Json(_) => (column.name, Style::Texts),
    })
}

/// The table in the language of Parquet's schemas.
pub(super) fn schema(with_vcpu: bool) -> String {
    let columns = columns(with_vcpu).map(|column| {
        let need = if column.required { "REQUIRED" } else { "OPTIONAL" };
        let (kind, means) = match column.value {
            Value::Time(_) | Value::Long(_) => ("INT64", ""),
            Value::Short(_) => ("INT32", " (INTEGER(32,false))"),
            Value::Text(_) => ("BYTE_ARRAY", " (UTF8)"),
            Value::Json(_) => ("BYTE_ARRAY", " (JSON)"),
        };
        format!("{need} {kind} {}{means};", column.name)
    });
    format!("message trace {{ {} }}", columns.collect::<String>())
}

/// Rows that wait to be a row group.
#[derive(Debug, Default)]
pub(super) struct Group {
    rows: Vec<Row>,
    pub(super) texts: Texts,
}

impl Group {
    pub(super) fn push(&mut self, row: Row) {
        self.rows.push(row);
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        self.rows.len() * size_of::<Row>() + self.texts.bytes
    }

    /// Writes it, sorted, and begins anew.
    ///
    /// # Errors
    /// When the output fails.
    pub(super) fn write(
        &mut self,
        out: &mut SerializedFileWriter<File>,
        labels: &Labels,
        with_vcpu: bool,
    ) -> io::Result<()> {
        let mut rows = std::mem::take(&mut self.rows);
        // They are larger than what they are sorted by.
        let mut order: Vec<_> = rows.iter().map(|row| (row.start, row.call)).zip(0_u32..).collect();
        order.sort_unstable();
        let place = |number: u32| rows.get(usize::try_from(number).ok()?);
        let sorted: Vec<_> = order.iter().filter_map(|(_, number)| place(*number)).collect();
        let texts = std::mem::take(&mut self.texts);
        let descriptions = out.schema_descr().columns().to_vec();
        let properties = Arc::clone(out.properties());
        let encode = |column: &Column, description: &ColumnDescPtr| {
            let (required, sorted) = (column.required, &sorted[..]);
            let mut to = To::new(description, &properties);
            let closed = match column.value {
                Value::Time(get) | Value::Long(get) => {
                    let get = |row: &Row| Some(get(row)).filter(|number| *number >= 0);
                    to.write::<Int64Type>(sorted, required, get)
                }
                Value::Short(get) => {
                    // The bits of a number without a sign.
                    let get = |row: &Row| Some(u32::try_from(get(row)).ok()?.cast_signed());
                    to.write::<Int32Type>(sorted, required, get)
                }
                Value::Text(get) | Value::Json(get) => {
                    let get = |row: &Row| get(row, labels, &texts);
                    to.write::<ByteArrayType>(sorted, required, get)
                }
            };
            Ok((Bytes::from(to.bytes.into_inner()?), closed?))
        };
        let encoded = by_several(sorted.len(), columns(with_vcpu).zip(&descriptions), encode)?;
        let mut group = out.next_row_group()?;
        for (bytes, closed) in encoded {
            group.append_column(&bytes, closed)?;
        }
        group.close()?;
        drop(sorted);
        rows.clear();
        self.rows = rows;
        Ok(())
    }
}

/// Rows from which on columns are encoded by several threads.
const MANY: usize = 1 << 14;
/// Most threads that do so.
const THREADS: usize = 4;

/// What `encode` makes of each of these columns, in their order.
fn by_several<'a, T: Send>(
    rows: usize,
    columns: impl Iterator<Item = (&'static Column, &'a ColumnDescPtr)>,
    encode: impl Fn(&Column, &ColumnDescPtr) -> io::Result<T> + Sync,
) -> io::Result<Vec<T>> {
    let columns: Vec<_> = columns.collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some((column, description)) = columns.get(number) else { break Ok(done) };
            done.push((number, encode(column, description)?));
        }
    };
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(THREADS);
    let threads = if rows < MANY { 1 } else { threads };
    thread::scope(|scope| {
        // Without them it takes longer.
        let start = |_| thread::Builder::new().name("columns".into()).spawn_scoped(scope, work);
        let others: Vec<_> = (1..threads).filter_map(|number| start(number).ok()).collect();
        let mut done: Vec<_> = work()?;
        for other in others {
            let found: io::Result<_> =
                other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            done.extend(found?);
        }
        done.sort_by_key(|(number, _)| *number);
        Ok(done.into_iter().map(|(_, column)| column).collect())
    })
}

/// A column of a group, as it will be in the file.
struct To<'a> {
    description: &'a ColumnDescPtr,
    properties: &'a WriterPropertiesPtr,
    bytes: TrackedWrite<Vec<u8>>,
}

impl<'a> To<'a> {
    fn new(description: &'a ColumnDescPtr, properties: &'a WriterPropertiesPtr) -> Self {
        Self { description, properties, bytes: TrackedWrite::new(Vec::new()) }
    }

    fn write<T: DataType>(
        &mut self,
        rows: &[&Row],
        required: bool,
        get: impl Fn(&Row) -> Option<T::T>,
    ) -> io::Result<ColumnCloseResult> {
        let pages = Box::new(SerializedPageWriter::new(&mut self.bytes));
        let (description, properties) = (Arc::clone(self.description), self.properties.clone());
        let column = get_column_writer(description, properties, pages);
        let mut column = get_typed_column_writer::<T>(column);
        let (mut values, mut there) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
        for rows in rows.chunks(BATCH) {
            values.clear();
            there.clear();
            for row in rows {
                let value = get(row);
                there.push(i16::from(value.is_some()));
                values.extend(value);
            }
            let levels = Some(&there[..]).filter(|_| !required);
            column.write_batch(&values, levels, None)?;
        }
        Ok(column.close()?)
    }
}
