//! The files: one, or several for each vCPU in Hive's layout (`vcpu=0/part-0.parquet`).

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::metadata::{KeyValue, SortingColumn};
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterPropertiesPtr};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use parquet::schema::types::{ColumnPath, TypePtr};
use rustc_hash::FxHashMap;
use serde_json::json;

use super::group::{Group, Uniform};
use super::table::{self, Labels, Row, START, START_INDEX, Style, Texts};
use crate::convert::calls::Tracers;
use crate::convert::ground::Names;
use crate::stream::{Header, Summary};

/// Rows of a row group, as DuckDB makes them: its threads take one at a time.
const ROWS: usize = 122_880;
/// Bytes that wait in all groups. Above that the largest is written as it is.
const HELD: usize = 128 << 20;
/// Row groups of a file in a directory: some 4 million rows.
const GROUPS: u32 = 32;
/// Most files that are open at a time.
const OPEN: usize = 128;

/// Where the files are.
#[derive(Debug)]
enum Place {
    /// Taken when it is opened.
    File(Option<File>),
    Folder(PathBuf),
}

/// All files.
#[derive(Debug)]
pub(super) struct Parts {
    place: Place,
    /// By vCPU in directories (less than zero: of none), else only zero.
    parts: FxHashMap<i64, Part>,
    labels: Labels,
    uniform: Uniform,
    about: Vec<(&'static str, String)>,
    held: usize,
}

/// What goes to the same files.
#[derive(Debug, Default)]
struct Part {
    /// Rows that began behind the group before.
    next: Group,
    /// Calls that began earlier.
    long: Group,
    /// When the present group begins.
    since: i64,
    /// The latest time in it.
    until: i64,
    out: Option<SerializedFileWriter<File>>,
    groups: u32,
    files: u32,
}

impl Parts {
    pub(super) fn one(file: File) -> Self {
        Self::of(Place::File(Some(file)))
    }

    pub(super) fn by_vcpu(place: &Path) -> Self {
        Self::of(Place::Folder(place.to_owned()))
    }

    fn of(place: Place) -> Self {
        Self {
            place,
            parts: FxHashMap::default(),
            labels: Labels::new(),
            uniform: Uniform::default(),
            about: Vec::new(),
            held: 0,
        }
    }

    /// What all files say of the trace.
    pub(super) fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.about = vec![
            ("vmtrace.version", header.vmtrace_version.clone()),
            ("vmtrace.kernel", header.release.clone()),
            ("vmtrace.arch", header.arch.clone()),
            ("vmtrace.clock", header.clock.clone()),
            ("vmtrace.clock_hz", header.clock_hz.to_string()),
            ("vmtrace.clock_start", header.clock_start.to_string()),
            ("vmtrace.vcpus", header.vcpus.to_string()),
        ];
        // A trace without a row is a table, too.
        if matches!(self.place, Place::File(_)) { self.open(0) } else { Ok(()) }
    }

    /// Adds a row; its texts are filled in where the row goes.
    pub(super) fn add(
        &mut self,
        names: &Names,
        tracers: &Tracers,
        mut row: Row,
        fill: impl FnOnce(&mut Texts, &mut Row),
    ) -> io::Result<()> {
        let key = if matches!(self.place, Place::File(_)) { 0 } else { row.vcpu };
        let part = self.parts.entry(key).or_default();
        part.until = part.until.max(row.start).max(row.stop);
        let long = row.start < part.since;
        let group = if long { &mut part.long } else { &mut part.next };
        let before = group.bytes();
        fill(&mut group.texts, &mut row);
        group.push(row);
        self.held += group.bytes() - before;
        if group.len() >= ROWS {
            self.write(names, tracers, key, long)?;
        }
        while self.held > HELD {
            let sizes = self.parts.iter().flat_map(|(key, part)| {
                [(part.next.bytes(), *key, false), (part.long.bytes(), *key, true)]
            });
            let Some((_, key, long)) = sizes.max() else { break };
            self.write(names, tracers, key, long)?;
        }
        Ok(())
    }

    /// Makes a row group of what waits.
    fn write(&mut self, names: &Names, tracers: &Tracers, key: i64, long: bool) -> io::Result<()> {
        self.labels.learn(names, tracers);
        self.open(key)?;
        let is_file = matches!(self.place, Place::File(_));
        let Some(part) = self.parts.get_mut(&key) else { return Ok(()) };
        let Some(out) = &mut part.out else { return Ok(()) };
        let group = if long { &mut part.long } else { &mut part.next };
        self.held = self.held.saturating_sub(group.bytes());
        group.write(out, &self.labels, is_file, &self.uniform)?;
        if !long {
            part.since = part.until;
        }
        part.groups += 1;
        if !is_file && part.groups >= GROUPS {
            part.close(None)?;
        }
        Ok(())
    }

    /// Opens the file that rows go to, if it is not open.
    fn open(&mut self, key: i64) -> io::Result<()> {
        let part = self.parts.entry(key).or_default();
        if part.out.is_some() {
            return Ok(());
        }
        let (file, with_vcpu) = match &mut self.place {
            Place::File(file) => (file.take().ok_or(io::ErrorKind::NotFound)?, true),
            Place::Folder(folder) => {
                let name = match u32::try_from(key) {
                    Ok(vcpu) => format!("vcpu={vcpu}"),
                    // Hive's name for rows that have none.
                    Err(_) => "vcpu=__HIVE_DEFAULT_PARTITION__".to_owned(),
                };
                let folder = folder.join(name);
                fs::create_dir_all(&folder)?;
                let file = folder.join(format!("part-{}.parquet", part.files));
                part.files += 1;
                (File::create_new(file)?, false)
            }
        };
        let (schema, properties) = (schema(with_vcpu)?, properties(&self.about)?);
        part.out = Some(SerializedFileWriter::new(file, schema, properties)?);
        if self.parts.values().filter(|part| part.out.is_some()).count() > OPEN {
            let others = self.parts.iter_mut().filter(|(other, _)| **other != key);
            others.map(|(_, part)| part).try_for_each(|part| part.close(None))?;
        }
        Ok(())
    }

    /// Nothing follows.
    pub(super) fn end(
        &mut self,
        names: &Names,
        tracers: &Tracers,
        summary: Option<&Summary>,
    ) -> io::Result<()> {
        let mut keys: Vec<_> = self.parts.keys().copied().collect();
        keys.sort_unstable();
        let summary = summary.map(serde_json::to_string).transpose()?;
        for key in keys {
            for long in [false, true] {
                let part = self.parts.get(&key);
                let group = part.map(|part| if long { &part.long } else { &part.next });
                if group.is_some_and(|group| group.len() > 0) {
                    self.write(names, tracers, key, long)?;
                }
            }
            if let Some(part) = self.parts.get_mut(&key) {
                part.close(summary.as_deref())?;
            }
        }
        let Place::Folder(folder) = &self.place else { return Ok(()) };
        // Readers of directories leave names out that begin so.
        let mut file = File::create_new(folder.join("_vmtrace.json"))?;
        let mut about: serde_json::Map<_, _> =
            self.about.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
        if let Some(summary) = &summary {
            about.insert(SUMMARY.to_owned(), serde_json::from_str(summary)?);
        }
        serde_json::to_writer_pretty(&mut file, &about)?;
        file.write_all(b"\n")
    }
}

const SUMMARY: &str = "vmtrace.summary";

impl Part {
    /// The file is whole.
    fn close(&mut self, summary: Option<&str>) -> io::Result<()> {
        let Some(mut out) = self.out.take() else { return Ok(()) };
        if let Some(summary) = summary {
            out.append_key_value_metadata(KeyValue::new(SUMMARY.to_owned(), summary.to_owned()));
        }
        self.groups = 0;
        out.close()?;
        Ok(())
    }
}

fn schema(with_vcpu: bool) -> io::Result<TypePtr> {
    Ok(Arc::new(parse_message_type(&table::schema(with_vcpu))?))
}

fn properties(about: &[(&str, String)]) -> io::Result<WriterPropertiesPtr> {
    let about = about.iter().map(|(key, value)| KeyValue::new((*key).to_owned(), value.clone()));
    let sorted = SortingColumn { column_idx: START_INDEX, descending: false, nulls_first: false };
    let mut properties = WriterProperties::builder()
        .set_created_by(format!("vmtrace {}", env!("CARGO_PKG_VERSION")))
        .set_key_value_metadata(Some(about.collect()))
        .set_sorting_columns(Some(vec![sorted]))
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(1)?))
        // Those of the group tell which to skip; of pages only times are worth their room.
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_column_statistics_enabled(ColumnPath::from(START), EnabledStatistics::Page);
    for (column, style) in table::styles() {
        let path = ColumnPath::from(column);
        properties = match style {
            Style::Rising => properties
                .set_column_dictionary_enabled(path.clone(), false)
                .set_column_encoding(path, Encoding::DELTA_BINARY_PACKED),
            Style::Numbers => properties.set_column_dictionary_enabled(path, false),
            Style::Texts => properties.set_column_statistics_enabled(path, EnabledStatistics::None),
            Style::Few => properties,
        };
    }
    Ok(Arc::new(properties.build()))
}

#[cfg(test)]
mod tests {
    use super::super::table::Kind;
    use super::*;

    fn begun(place: &Path) -> Parts {
        let mut parts = Parts::by_vcpu(place);
        parts.begin(&Header::default()).expect("nothing is written");
        parts
    }

    // A process has 1024 descriptors, and a trace may have 4096 vCPUs.
    #[test]
    fn files_of_many_vcpus_are_not_all_open() {
        let folder = tempfile::tempdir().expect("a directory");
        let mut parts = begun(folder.path());
        for vcpu in 0..300 {
            parts.open(vcpu).expect("a file");
            let open = parts.parts.values().filter(|part| part.out.is_some()).count();
            assert!(open <= OPEN, "{open}");
        }
        parts.open(0).expect("the next file");
        assert!(folder.path().join("vcpu=0/part-1.parquet").exists());
        parts.end(&Names::new(), &Tracers::default(), None).expect("room");
    }

    // A console may say a megabyte a line.
    #[test]
    fn texts_count_as_memory_that_is_held() {
        let folder = tempfile::tempdir().expect("a directory");
        let (mut parts, names, tracers) = (begun(folder.path()), Names::new(), Tracers::default());
        for number in 0..200_usize {
            let text = number.to_string().repeat((1 << 20) / 3);
            let row = Row { vcpu: i64::from(number % 3 == 0), ..Row::new(Kind::Mark) };
            let fill = |texts: &mut Texts, row: &mut Row| row.text = texts.optional(Some(&*text));
            parts.add(&names, &tracers, row, fill).expect("room");
            let held: usize =
                parts.parts.values().map(|part| part.next.bytes() + part.long.bytes()).sum();
            assert_eq!(held, parts.held);
            assert!(held <= HELD, "{held}");
        }
        parts.end(&names, &tracers, None).expect("room");
        assert_eq!(parts.held, 0);
    }
}
