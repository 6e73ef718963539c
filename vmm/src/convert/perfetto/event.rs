//! Events on tracks. There are as many as records, so that their bytes are written as they are put together:
//! prost would make a message of each, and look at it three times. Numbers of fields are those of Perfetto's
//! `TrackEvent`, in whose order they are written.

use std::borrow::Cow;

use super::wire::{InternedData, NEEDS_STATE, TracePacket};

/// `TrackEvent.type`.
pub(super) const SLICE_BEGIN: u64 = 1;
pub(super) const SLICE_END: u64 = 2;
pub(super) const INSTANT: u64 = 3;
pub(super) const COUNTER: u64 = 4;

/// What was not interned before.
pub(super) type New = Option<Box<InternedData>>;

/// `TrackEvent`.
#[derive(Debug, Default)]
pub(super) struct TrackEvent {
    pub(super) kind: u64,
    pub(super) track_uuid: u64,
    pub(super) category_iid: Option<u64>,
    pub(super) name_iid: Option<u64>,
    pub(super) name: Option<String>,
    pub(super) counter_value: Option<u64>,
    /// As they are written.
    annotations: Vec<u8>,
}

/// The value of a `DebugAnnotation`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value<'a> {
    Bool(bool),
    Uint(u64),
    Int(i64),
    Text(Cow<'a, str>),
    Pointer(u64),
    TextIid(u64),
}

impl TrackEvent {
    /// One of that kind on a track.
    pub(super) fn new(kind: u64, track_uuid: u64) -> Self {
        Self { kind, track_uuid, ..Self::default() }
    }

    /// The same, with room of another one for its annotations.
    pub(super) fn in_room(room: Vec<u8>) -> Self {
        Self { annotations: room, ..Self::default() }
    }

    /// Room for the annotations of another one.
    pub(super) fn into_room(self) -> Vec<u8> {
        let mut room = self.annotations;
        room.clear();
        room
    }

    /// Adds a value with a name that was interned.
    #[inline]
    pub(super) fn annotate(&mut self, name_iid: u64, value: &Value<'_>) {
        message(&mut self.annotations, 4, |out| {
            number(out, 1, name_iid);
            value.write(out);
        });
    }

    /// The same with a name.
    pub(super) fn annotate_by(&mut self, name: &str, value: &Value<'_>) {
        message(&mut self.annotations, 4, |out| {
            value.write(out);
            bytes(out, 10, name.as_bytes());
        });
    }

    /// Writes the packet of this event, as field 1 of `Trace`.
    #[inline]
    pub(super) fn write(&self, out: &mut Vec<u8>, timestamp: u64, new: &New) {
        message(out, 1, |out| {
            number(out, 8, timestamp);
            number(out, 10, TracePacket::SEQUENCE.into());
            message(out, 11, |out| self.write_fields(out));
            if let Some(new) = new {
                prost::encoding::message::encode(12, &**new, out);
            }
            number(out, 13, NEEDS_STATE.into());
        });
    }

    #[inline]
    fn write_fields(&self, out: &mut Vec<u8>) {
        if let Some(category) = self.category_iid {
            number(out, 3, category);
        }
        out.extend_from_slice(&self.annotations);
        number(out, 9, self.kind);
        if let Some(name) = self.name_iid {
            number(out, 10, name);
        }
        number(out, 11, self.track_uuid);
        if let Some(name) = &self.name {
            bytes(out, 23, name.as_bytes());
        }
        if let Some(value) = self.counter_value {
            number(out, 30, value);
        }
    }
}

impl Value<'_> {
    #[inline]
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Bool(yes) => number(out, 2, (*yes).into()),
            Self::Uint(value) => number(out, 3, *value),
            Self::Int(value) => number(out, 4, value.cast_unsigned()),
            Self::Text(text) => bytes(out, 6, text.as_bytes()),
            Self::Pointer(value) => number(out, 7, *value),
            Self::TextIid(iid) => number(out, 17, *iid),
        }
    }
}

#[inline]
fn varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(low(number) | 0x80);
        number >>= 7;
    }
    out.push(low(number));
}

/// The lowest 7 bits.
#[inline]
fn low(number: u64) -> u8 {
    number.to_le_bytes()[0] & 0x7f
}

#[inline]
fn number(out: &mut Vec<u8>, tag: u64, number: u64) {
    varint(out, tag << 3);
    varint(out, number);
}

#[inline]
fn bytes(out: &mut Vec<u8>, tag: u64, bytes: &[u8]) {
    varint(out, tag << 3 | 2);
    varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// A message in another one.
#[inline]
fn message(out: &mut Vec<u8>, tag: u64, fields: impl FnOnce(&mut Vec<u8>)) {
    varint(out, tag << 3 | 2);
    let at = out.len();
    // Most are short: their length takes one byte.
    out.push(0);
    fields(out);
    let length = out.len() - at - 1;
    match (u8::try_from(length), out.get_mut(at)) {
        (Ok(length @ ..0x80), Some(place)) => *place = length,
        _ => {
            let mut longer = Vec::new();
            varint(&mut longer, length as u64);
            out.splice(at..=at, longer);
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::super::wire::Interned;
    use super::*;

    #[derive(Clone, PartialEq, Message)]
    struct Packet {
        #[prost(uint64, optional, tag = "8")]
        timestamp: Option<u64>,
        #[prost(uint32, optional, tag = "10")]
        trusted_packet_sequence_id: Option<u32>,
        #[prost(message, optional, tag = "11")]
        track_event: Option<Event>,
        #[prost(message, optional, tag = "12")]
        interned_data: Option<InternedData>,
        #[prost(uint32, optional, tag = "13")]
        sequence_flags: Option<u32>,
    }

    #[derive(Clone, PartialEq, Message)]
    struct Event {
        #[prost(uint64, repeated, packed = "false", tag = "3")]
        category_iids: Vec<u64>,
        #[prost(message, repeated, tag = "4")]
        debug_annotations: Vec<Annotation>,
        #[prost(int32, optional, tag = "9")]
        kind: Option<i32>,
        #[prost(uint64, optional, tag = "10")]
        name_iid: Option<u64>,
        #[prost(uint64, optional, tag = "11")]
        track_uuid: Option<u64>,
        #[prost(string, optional, tag = "23")]
        name: Option<String>,
        #[prost(int64, optional, tag = "30")]
        counter_value: Option<i64>,
    }

    #[derive(Clone, PartialEq, Message)]
    struct Annotation {
        #[prost(uint64, optional, tag = "1")]
        name_iid: Option<u64>,
        #[prost(string, optional, tag = "10")]
        name: Option<String>,
        #[prost(oneof = "Of", tags = "2, 3, 4, 6, 7, 17")]
        value: Option<Of>,
    }

    #[derive(Clone, PartialEq, prost::Oneof)]
    enum Of {
        #[prost(bool, tag = "2")]
        Bool(bool),
        #[prost(uint64, tag = "3")]
        Uint(u64),
        #[prost(int64, tag = "4")]
        Int(i64),
        #[prost(string, tag = "6")]
        Text(String),
        #[prost(uint64, tag = "7")]
        Pointer(u64),
        #[prost(uint64, tag = "17")]
        TextIid(u64),
    }

    fn expected(packet: &Packet) -> Vec<u8> {
        let mut out = Vec::new();
        prost::encoding::message::encode(1, packet, &mut out);
        out
    }

    // A length that is wrong makes all that follows unreadable.
    #[test]
    fn events_are_written_as_prost_writes_them() {
        for length in [0, 1, 60, 90, 100, 110, 127, 128, 300, 20_000] {
            let text = "x".repeat(length);
            let values = [
                (Value::Bool(true), Of::Bool(true)),
                (Value::Uint(u64::MAX), Of::Uint(u64::MAX)),
                (Value::Int(-5), Of::Int(-5)),
                (Value::Text((&*text).into()), Of::Text(text.clone())),
                (Value::Pointer(0xffff_ffff_8100_0000), Of::Pointer(0xffff_ffff_8100_0000)),
                (Value::TextIid(300), Of::TextIid(300)),
            ];
            for (value, of) in values {
                let mut event = TrackEvent::new(INSTANT, 1 << 40);
                event.annotate(7, &value);
                event.annotate_by(&text, &value);
                (event.category_iid, event.name_iid) = (Some(2), Some(128));
                event.name = Some(text.clone());
                event.counter_value = Some(1 << 33);
                let new = InternedData {
                    event_names: vec![Interned { iid: Some(1), text: Some(text.clone()) }],
                    ..InternedData::default()
                };
                let track_event = Event {
                    category_iids: vec![2],
                    debug_annotations: vec![
                        Annotation { name_iid: Some(7), name: None, value: Some(of.clone()) },
                        Annotation { name_iid: None, name: Some(text.clone()), value: Some(of) },
                    ],
                    kind: Some(3),
                    name_iid: Some(128),
                    track_uuid: Some(1 << 40),
                    name: Some(text.clone()),
                    counter_value: Some(1 << 33),
                };
                let packet = Packet {
                    timestamp: Some(0),
                    trusted_packet_sequence_id: Some(1),
                    track_event: Some(track_event),
                    interned_data: Some(new.clone()),
                    sequence_flags: Some(2),
                };
                let mut out = Vec::new();
                event.write(&mut out, 0, &Some(Box::new(new)));
                assert_eq!(out, expected(&packet), "{value:?} {length}");
            }
        }
    }

    #[test]
    fn what_an_event_has_not_is_not_written() {
        let mut out = Vec::new();
        let mut before = TrackEvent::new(SLICE_BEGIN, 1);
        before.annotate(1, &Value::Uint(1));
        let mut event = TrackEvent::in_room(before.into_room());
        (event.kind, event.track_uuid) = (SLICE_END, 17);
        event.write(&mut out, 5, &None);
        let track_event = Event { kind: Some(2), track_uuid: Some(17), ..Event::default() };
        let packet = Packet {
            timestamp: Some(5),
            trusted_packet_sequence_id: Some(1),
            track_event: Some(track_event),
            interned_data: None,
            sequence_flags: Some(2),
        };
        assert_eq!(out, expected(&packet));
    }
}
