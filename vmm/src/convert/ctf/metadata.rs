//! The description of streams, in the format's own language (TSDL: CTF 1.8.3, appendix C).

use std::fmt::Write as _;
use std::hash::{BuildHasher, Hash, Hasher};
use std::io;

use rustc_hash::{FxBuildHasher, FxHashMap};

use super::super::ground::{numbered, too_many};
use super::{Fields, StreamId, Value};
use crate::stream::Header;

/// Most classes, and most bytes of a name.
const CLASSES: usize = 1 << 16;
const NAME: usize = 200;

/// Types, and all that is the same in every trace. Events carry 64 bits of time, so that none wraps.
const COMMON: &str = "\
typealias integer { size = 32; align = 8; signed = false; } := uint32_t;
typealias integer { size = 32; align = 8; signed = true; } := int32_t;
typealias integer { size = 64; align = 8; signed = false; } := uint64_t;
typealias integer { size = 64; align = 8; signed = true; } := int64_t;
typealias integer { size = 64; align = 8; signed = false; base = 16; } := address_t;

trace {
    major = 1;
    minor = 8;
    byte_order = le;
    packet.header := struct { uint32_t magic; uint32_t stream_id; };
};

clock {
    name = guest;
    description = \"nanoseconds since the start of the guest's clock\";
    freq = 1000000000;
    offset = 0;
};

typealias integer {
    size = 64; align = 8; signed = false; map = clock.guest.value;
} := guest_time_t;
";

const STREAMS: &str = "
stream {
    id = 0;
    event.header := struct { uint32_t id; guest_time_t timestamp; };
    event.context := struct { int32_t _tid; int32_t _pid; string _procname; };
    packet.context := struct {
        guest_time_t timestamp_begin;
        guest_time_t timestamp_end;
        uint64_t content_size;
        uint64_t packet_size;
        uint64_t packet_seq_num;
        uint64_t events_discarded;
        uint32_t cpu_id;
    };
};

stream {
    id = 1;
    event.header := struct { uint32_t id; guest_time_t timestamp; };
    packet.context := struct {
        guest_time_t timestamp_begin;
        guest_time_t timestamp_end;
        uint64_t content_size;
        uint64_t packet_size;
        uint64_t packet_seq_num;
        uint64_t events_discarded;
    };
};
";

/// Kinds of events, by their stream, name, and the names and types of their fields.
#[derive(Debug, Default)]
pub(super) struct Classes {
    /// Numbers by hash: those few that share one.
    numbers: FxHashMap<u64, Vec<u32>>,
    known: Vec<Class>,
}

#[derive(Debug)]
struct Class {
    stream: StreamId,
    name: Box<str>,
    fields: Vec<(Box<str>, &'static str)>,
}

fn type_of(value: &Value<'_>) -> &'static str {
    match value {
        Value::Unsigned(_) => "uint64_t",
        Value::Signed(_) => "int64_t",
        Value::Address(_) => "address_t",
        Value::Text(_) => "string",
    }
}

impl Classes {
    /// The number of a class.
    ///
    /// # Errors
    /// When there are too many.
    pub(super) fn id(
        &mut self,
        stream: StreamId,
        name: &str,
        fields: &Fields<'_>,
    ) -> io::Result<u32> {
        let mut hasher = FxBuildHasher.build_hasher();
        (stream, name).hash(&mut hasher);
        for (field, value) in fields {
            (field, std::mem::discriminant(value)).hash(&mut hasher);
        }
        let numbers = self.numbers.entry(hasher.finish()).or_default();
        let is = |class: &Class| {
            class.stream == stream
                && *class.name == *name
                && class.fields.len() == fields.len()
                && class.fields.iter().zip(fields).all(|((known, kind), (field, value))| {
                    **known == **field && *kind == type_of(value)
                })
        };
        let known = |number: &&u32| {
            usize::try_from(**number).ok().and_then(|it| self.known.get(it)).is_some_and(is)
        };
        if let Some(number) = numbers.iter().find(known) {
            return Ok(*number);
        }
        if self.known.len() >= CLASSES {
            return Err(too_many("events"));
        }
        let number = u32::try_from(self.known.len()).unwrap_or(u32::MAX);
        numbers.push(number);
        let fields = fields.iter().map(|(field, value)| (field.as_ref().into(), type_of(value)));
        self.known.push(Class { stream, name: name.into(), fields: fields.collect() });
        Ok(number)
    }

    /// The text of the file `metadata`.
    pub(super) fn metadata(&self, header: &Header) -> String {
        let mut out = format!("/* CTF 1.8 */\n\n{COMMON}\nenv {{\n");
        let version = &header.vmtrace_version;
        let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
        let (major, minor) = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
        for (key, value) in [
            ("domain", "kernel"),
            ("tracer_name", "vmtrace"),
            ("tracer_version", version),
            ("sysname", "Linux"),
            ("kernel_release", &header.release),
            ("machine", &header.arch),
            ("clock", &header.clock),
        ] {
            let _ = writeln!(out, "    {key} = \"{}\";", literal(value));
        }
        let _ = writeln!(out, "    tracer_major = {major};\n    tracer_minor = {minor};\n}};");
        out.push_str(STREAMS);
        for (id, class) in self.known.iter().enumerate() {
            let (stream, name) = (class.stream as u32, literal(&class.name));
            let _ = write!(
                out,
                "\nevent {{\n    name = \"{name}\";\n    id = {id};\n    stream_id = {stream};\n    \
                 fields := struct {{\n"
            );
            let mut taken: Vec<String> = Vec::new();
            for (field, kind) in &class.fields {
                let name = identifier(field, &taken);
                let _ = writeln!(out, "        {kind} {name};");
                taken.push(name);
            }
            out.push_str("    };\n};\n");
        }
        out
    }
}

/// A text between quotation marks: names are the guest's, and may be anything.
fn literal(text: &str) -> String {
    let good = |c: char| !c.is_control() && c != '"' && c != '\\';
    text.chars().take(NAME).map(|c| if good(c) { c } else { '?' }).collect()
}

/// A field's name. Readers take the first underscore away; it keeps names from being keywords.
fn identifier(name: &str, taken: &[String]) -> String {
    let good = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let name: String = name.chars().take(NAME).map(|c| if good(c) { c } else { '_' }).collect();
    let name = format!("_{name}");
    numbered(&name, taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Two fields of one name are refused by readers, and a quotation mark ends more than a text.
    #[test]
    fn names_are_identifiers_and_literals() {
        let taken = [identifier("file->f_flags", &[])];
        assert_eq!(taken, ["_file__f_flags"]);
        assert_eq!(identifier("file..f_flags", &taken), "_file__f_flags_2");
        assert_eq!(identifier("struct", &[]), "_struct");
        assert_eq!(identifier("1\u{e4};", &[]), "_1__");
        assert_eq!(literal("a\"; }\\\n"), "a?; }??");
    }

    #[test]
    fn classes_differ_by_name_fields_and_types() {
        let mut classes = Classes::default();
        let field = |value| vec![("fd".into(), value)];
        let mut id = |stream, name: &str, fields| classes.id(stream, name, &fields).expect("room");
        assert_eq!(id(StreamId::Vcpu, "a", field(Value::Signed(1))), 0);
        assert_eq!(id(StreamId::Vcpu, "a", field(Value::Unsigned(1))), 1);
        assert_eq!(id(StreamId::Vcpu, "b", field(Value::Signed(1))), 2);
        assert_eq!(id(StreamId::Marks, "a", field(Value::Signed(1))), 3);
        assert_eq!(id(StreamId::Vcpu, "a", Vec::new()), 4);
        assert_eq!(id(StreamId::Vcpu, "a", field(Value::Signed(-1))), 0);
    }
}
