//! The header, the first frame: it has everything that a consumer must know before any record.

use zerocopy::{FromBytes, IntoBytes};

use super::wire::{ALIGN, HeaderFixed, MAX_VCPUS, PairHead};

/// Most bytes of text in a header.
const MAX_TEXT: usize = 512 << 10;

const BILLION: u64 = 1_000_000_000;

/// So many ticks of a clock of `hz` ticks a second in nanoseconds, rounded down.
#[must_use]
#[inline]
pub fn nanoseconds(ticks: u64, hz: u64) -> u128 {
    let hz = hz.max(1);
    // The time since a boot, or of a call, is mostly short enough for one division.
    if let Some(product) = ticks.checked_mul(BILLION) {
        return u128::from(product / hz);
    }
    // Most rates need no division of more than 64 bits.
    if hz <= u64::MAX / BILLION {
        let (seconds, rest) = (ticks / hz, ticks % hz);
        return u128::from(seconds) * u128::from(BILLION) + u128::from(rest * BILLION / hz);
    }
    u128::from(ticks) * u128::from(BILLION) / u128::from(hz)
}

/// What a consumer must know before any record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Architecture as `uname -m` says it: `x86_64`, `riscv64`.
    pub arch: String,
    /// Name of the clock behind every timestamp, such as `x86-tsc`.
    pub clock: String,
    /// Ticks of the clock per second; not zero.
    pub clock_hz: u64,
    /// Ticks that print as 0.000000.
    pub clock_start: u64,
    /// The guest kernel's release.
    pub release: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Runtime minus link address of the kernel (KASLR).
    pub slide: u64,
    /// Added to the 32-bit addresses in records.
    pub address_base: u64,
    /// Version of vmtrace that made the stream.
    pub vmtrace_version: String,
    /// Further keys and values, of later versions.
    pub extra: Vec<(String, String)>,
}

impl Header {
    /// The window of both supported architectures: kernel and modules are in the top 4 GiB.
    pub const TOP_4_GIB: u64 = 0xffff_ffff_0000_0000;

    /// The address behind a 32-bit address of a record.
    #[must_use]
    pub fn address(&self, offset: u32) -> u64 {
        self.address_base.wrapping_add(u64::from(offset))
    }

    /// The 32-bit form of an address, if it is in this stream's window.
    #[must_use]
    pub fn offset(&self, address: u64) -> Option<u32> {
        u32::try_from(address.wrapping_sub(self.address_base)).ok()
    }

    /// Nanoseconds from the clock's start to `ticks`, rounded down.
    #[must_use]
    pub fn nanoseconds(&self, ticks: u64) -> i128 {
        if let Some(since) = ticks.checked_sub(self.clock_start) {
            // No product of what `nanoseconds` takes is beyond 2^94.
            return i128::try_from(nanoseconds(since, self.clock_hz)).unwrap_or(i128::MAX);
        }
        let since = i128::from(ticks) - i128::from(self.clock_start);
        (since * i128::from(BILLION)).div_euclid(i128::from(self.clock_hz.max(1)))
    }

    /// So many ticks in nanoseconds, rounded down.
    #[must_use]
    pub fn duration_ns(&self, ticks: u64) -> u64 {
        u64::try_from(nanoseconds(ticks, self.clock_hz)).unwrap_or(u64::MAX)
    }

    fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        let known = [
            ("arch", self.arch.as_str()),
            ("clock", &self.clock),
            ("release", &self.release),
            ("vmtrace", &self.vmtrace_version),
        ];
        known.into_iter().chain(self.extra.iter().map(|(key, value)| (&**key, &**value)))
    }

    /// Why this header cannot be sent or accepted.
    pub(super) fn fault(&self) -> Option<String> {
        if self.clock_hz == 0 {
            return Some("the clock's rate is zero".into());
        }
        if self.vcpus == 0 || self.vcpus > MAX_VCPUS {
            return Some(format!("{} vCPUs, allowed are 1 to {MAX_VCPUS}", self.vcpus));
        }
        if self.pairs().any(|(key, value)| key.len().max(value.len()) > usize::from(u16::MAX)) {
            return Some("a text is longer than 65535 bytes".into());
        }
        let text = self.pairs().map(|(key, value)| 2 * ALIGN + key.len() + value.len());
        if text.sum::<usize>() > MAX_TEXT {
            return Some(format!("its texts are longer than {MAX_TEXT} bytes"));
        }
        None
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let fixed = HeaderFixed {
            clock_hz: self.clock_hz.into(),
            clock_start: self.clock_start.into(),
            address_base: self.address_base.into(),
            slide: self.slide.into(),
            vcpus: self.vcpus.into(),
            strings: u32::try_from(self.pairs().count()).unwrap_or(u32::MAX).into(),
        };
        out.extend_from_slice(fixed.as_bytes());
        for (key, value) in self.pairs() {
            let head = PairHead {
                key: u16::try_from(key.len()).unwrap_or(0).into(),
                value: u16::try_from(value.len()).unwrap_or(0).into(),
            };
            out.extend_from_slice(head.as_bytes());
            out.extend_from_slice(key.as_bytes());
            out.extend_from_slice(value.as_bytes());
            let length = size_of::<PairHead>() + key.len() + value.len();
            out.resize(out.len() + (length.next_multiple_of(ALIGN) - length), 0);
        }
    }

    pub(super) fn decode(payload: &[u8]) -> Result<Self, String> {
        let cut = || "the header is shorter than its parts".to_owned();
        let (fixed, mut rest) = HeaderFixed::ref_from_prefix(payload).map_err(|_| cut())?;
        let mut header = Self {
            clock_hz: fixed.clock_hz.get(),
            clock_start: fixed.clock_start.get(),
            vcpus: fixed.vcpus.get(),
            slide: fixed.slide.get(),
            address_base: fixed.address_base.get(),
            ..Self::default()
        };
        for _ in 0..fixed.strings.get() {
            let (head, _) = PairHead::ref_from_prefix(rest).map_err(|_| cut())?;
            let key_end = size_of::<PairHead>() + usize::from(head.key.get());
            let value_end = key_end + usize::from(head.value.get());
            let text = |from, to| {
                rest.get(from..to).map(|text| String::from_utf8_lossy(text).into_owned())
            };
            let key = text(size_of::<PairHead>(), key_end).ok_or_else(cut)?;
            let value = text(key_end, value_end).ok_or_else(cut)?;
            rest = rest.get(value_end.next_multiple_of(ALIGN)..).ok_or_else(cut)?;
            match &*key {
                "arch" => header.arch = value,
                "clock" => header.clock = value,
                "release" => header.release = value,
                "vmtrace" => header.vmtrace_version = value,
                _ => header.extra.push((key, value)),
            }
        }
        match header.fault() {
            Some(fault) => Err(fault),
            None => Ok(header),
        }
    }
}
