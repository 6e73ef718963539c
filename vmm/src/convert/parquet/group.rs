//! Rows that become a row group: held by columns, sorted and encoded.

use std::fs::File;
use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use bytes::Bytes;
use parquet::column::writer::{ColumnCloseResult, get_column_writer, get_typed_column_writer};
use parquet::data_type::{ByteArray, ByteArrayType, DataType, Int32Type, Int64Type};
use parquet::file::properties::WriterPropertiesPtr;
use parquet::file::writer::{SerializedFileWriter, SerializedPageWriter, TrackedWrite};
use parquet::schema::types::ColumnDescPtr;
use rustc_hash::FxHashMap;

use super::table::{CALL, COLUMNS, Column, Labels, NONE, Row, START, Texts, Value};

/// Rows that go to the library at a time.
const BATCH: usize = 4096;
/// Rows that are put into columns at a time: few enough to be in the processor's cache.
const TILE: usize = 128;

/// What a column has of the rows of a group: see [`Value`].
#[derive(Debug)]
enum Cells {
    Longs(Vec<i64>),
    Shorts(Vec<u32>),
}

/// Rows that wait to be a row group.
#[derive(Debug)]
pub(super) struct Group {
    /// Those that are not in columns yet.
    tile: Vec<Row>,
    /// Of each of [`COLUMNS`], of the rows before those.
    cells: Vec<Cells>,
    rows: usize,
    pub(super) texts: Texts,
}

impl Default for Group {
    fn default() -> Self {
        let cells = COLUMNS.iter().map(|column| match column.value {
            Value::Time(_) | Value::Long(_) => Cells::Longs(Vec::new()),
            Value::Short(_) | Value::Text(..) => Cells::Shorts(Vec::new()),
        });
        Self { tile: Vec::new(), cells: cells.collect(), rows: 0, texts: Texts::default() }
    }
}

impl Group {
    pub(super) fn push(&mut self, row: Row) {
        self.tile.push(row);
        self.rows += 1;
        if self.tile.len() >= TILE {
            self.settle();
        }
    }

    /// Puts rows into columns.
    fn settle(&mut self) {
        for (column, cells) in COLUMNS.iter().zip(&mut self.cells) {
            match (&column.value, cells) {
                (Value::Time(fill) | Value::Long(fill), Cells::Longs(cells)) => {
                    fill(&self.tile, cells);
                }
                (Value::Short(fill) | Value::Text(_, fill), Cells::Shorts(cells)) => {
                    fill(&self.tile, cells);
                }
                // As they were made.
                _ => {}
            }
        }
        self.tile.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.rows
    }

    /// Memory that it takes, at most.
    pub(super) fn bytes(&self) -> usize {
        self.rows * size_of::<Row>() + self.texts.bytes()
    }

    /// The places of rows by their times, and of those of one time by their calls.
    fn order(&self) -> Vec<u32> {
        let longs = |name| {
            let mut all = COLUMNS.iter().zip(&self.cells);
            match all.find(|(column, _)| column.name == name) {
                Some((_, Cells::Longs(cells))) => &cells[..],
                _ => &[],
            }
        };
        let keys = longs(START).iter().zip(longs(CALL)).zip(0_u32..);
        let mut order: Vec<_> = keys.map(|((start, call), place)| (*start, *call, place)).collect();
        order.sort_unstable();
        order.into_iter().map(|(.., place)| place).collect()
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
        uniform: &Uniform,
    ) -> io::Result<()> {
        self.settle();
        let order = self.order();
        let texts = std::mem::take(&mut self.texts);
        let descriptions = out.schema_descr().columns().to_vec();
        let properties = Arc::clone(out.properties());
        let encode = |(column, cells): (&Column, &Cells), description: &ColumnDescPtr| {
            let only = Only::of(column, cells, labels, &texts);
            if let Some(known) =
                only.as_ref().and_then(|only| uniform.get(column, order.len(), only))
            {
                return Ok(known);
            }
            let mut to = To::new(description, &properties, column.required);
            let closed = match cells {
                Cells::Longs(cells) => {
                    let cells = gather(&order, cells);
                    to.write::<Int64Type>(cells.map(|cell| Some(cell).filter(|cell| *cell >= 0)))
                }
                Cells::Shorts(cells) => {
                    let cells = gather(&order, cells);
                    match column.value {
                        Value::Text(of, _) => {
                            let texts = cells.map(|cell| labels.get(of, cell, &texts));
                            to.write::<ByteArrayType>(texts)
                        }
                        _ => to.write::<Int32Type>(cells.map(number)),
                    }
                }
            }?;
            let encoded = (Bytes::from(to.bytes.into_inner()?), closed);
            if let Some(only) = only {
                uniform.keep(column, order.len(), only, &encoded);
            }
            Ok(encoded)
        };
        let cells = COLUMNS.iter().zip(&self.cells);
        let cells = cells.filter(|(column, _)| column.is_in(with_vcpu));
        let encoded = by_several(order.len(), cells.zip(&descriptions), encode)?;
        let mut group = out.next_row_group()?;
        for (bytes, closed) in encoded {
            group.append_column(&bytes, closed)?;
        }
        group.close()?;
        for cells in &mut self.cells {
            match cells {
                Cells::Longs(cells) => cells.clear(),
                Cells::Shorts(cells) => cells.clear(),
            }
        }
        self.rows = 0;
        Ok(())
    }
}

/// The bits of a number without a sign.
fn number(cell: u32) -> Option<i32> {
    Some(cell).filter(|cell| *cell != NONE).map(u32::cast_signed)
}

/// Cells in this order.
fn gather<'a, T: Copy>(order: &'a [u32], cells: &'a [T]) -> impl Iterator<Item = T> + 'a {
    order.iter().filter_map(|place| cells.get(usize::try_from(*place).ok()?).copied())
}

/// A column of a group, as it will be in the file.
type Encoded = (Bytes, ColumnCloseResult);

/// The one value of a column in all rows of a group.
#[derive(Debug, PartialEq)]
enum Only {
    None,
    Number(i64),
    Text(ByteArray),
}

impl Only {
    /// If there is one.
    fn of(column: &Column, cells: &Cells, labels: &Labels, texts: &Texts) -> Option<Self> {
        fn same<T: Copy + PartialEq>(cells: &[T]) -> Option<T> {
            let first = cells.first().copied()?;
            cells.iter().all(|cell| *cell == first).then_some(first)
        }
        match (cells, &column.value) {
            (Cells::Longs(cells), _) => {
                same(cells).map(|cell| if cell < 0 { Self::None } else { Self::Number(cell) })
            }
            (Cells::Shorts(cells), Value::Text(of, _)) => {
                let get = |cell: u32| labels.get(*of, cell, texts);
                match same(cells) {
                    Some(cell) => Some(get(cell).map_or(Self::None, Self::Text)),
                    // Of functions that are not of modules.
                    None => cells.iter().all(|cell| get(*cell).is_none()).then_some(Self::None),
                }
            }
            (Cells::Shorts(cells), _) => same(cells)
                .map(|cell| number(cell).map_or(Self::None, |it| Self::Number(it.into()))),
        }
    }
}

/// Columns that had one value in all rows of a group, as they were encoded: half of all are empty, and most groups
/// have as many rows as the one before.
#[derive(Debug, Default)]
pub(super) struct Uniform(Mutex<FxHashMap<&'static str, (usize, Only, Encoded)>>);

impl Uniform {
    fn get(&self, column: &Column, rows: usize, only: &Only) -> Option<Encoded> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (of, what, encoded) = all.get(column.name)?;
        (*of == rows && what == only).then(|| encoded.clone())
    }

    fn keep(&self, column: &Column, rows: usize, only: Only, encoded: &Encoded) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(column.name, (rows, only, encoded.clone()));
    }
}

/// Rows from which on columns are encoded by several threads.
const MANY: usize = 1 << 14;
/// Most threads that do so.
const THREADS: usize = 4;

/// What `encode` makes of each of these columns, in their order.
fn by_several<'a, C: Copy + Sync, T: Send>(
    rows: usize,
    columns: impl Iterator<Item = (C, &'a ColumnDescPtr)>,
    encode: impl Fn(C, &ColumnDescPtr) -> io::Result<T> + Sync,
) -> io::Result<Vec<T>> {
    let columns: Vec<_> = columns.collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some((column, description)) = columns.get(number) else { break Ok(done) };
            done.push((number, encode(*column, description)?));
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

/// Where a column is encoded.
struct To<'a> {
    description: &'a ColumnDescPtr,
    properties: &'a WriterPropertiesPtr,
    required: bool,
    bytes: TrackedWrite<Vec<u8>>,
}

impl<'a> To<'a> {
    fn new(
        description: &'a ColumnDescPtr,
        properties: &'a WriterPropertiesPtr,
        required: bool,
    ) -> Self {
        Self { description, properties, required, bytes: TrackedWrite::new(Vec::new()) }
    }

    fn write<T: DataType>(
        &mut self,
        mut cells: impl Iterator<Item = Option<T::T>>,
    ) -> io::Result<ColumnCloseResult> {
        let pages = Box::new(SerializedPageWriter::new(&mut self.bytes));
        let (description, properties) = (Arc::clone(self.description), self.properties.clone());
        let column = get_column_writer(description, properties, pages);
        let mut column = get_typed_column_writer::<T>(column);
        let (mut values, mut there) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
        loop {
            values.clear();
            there.clear();
            for cell in cells.by_ref().take(BATCH) {
                there.push(i16::from(cell.is_some()));
                values.extend(cell);
            }
            if there.is_empty() {
                break Ok(column.close()?);
            }
            let levels = Some(&there[..]).filter(|_| !self.required);
            column.write_batch(&values, levels, None)?;
        }
    }
}
