//! Requests in the guest's memory (virtio 1.2, section 5.2.6).

use std::collections::VecDeque;

use virtio_bindings::virtio_blk as blk;
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zerocopy::FromBytes;
use zerocopy::little_endian::{U32, U64};

use super::disk::SECTOR;
use super::{MAX_RANGE, MAX_RANGES, QUEUE_SIZE};
use crate::devices::virtio::Broken;
use crate::devices::virtio::buffers::{Buffers, Chain, Unreachable};

/// What the driver is told of the end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    /// The device or the driver has made an error.
    Error,
    /// There is no such request.
    Unsupported,
}

impl From<Unreachable> for Status {
    fn from(_: Unreachable) -> Status {
        Status::Error
    }
}

impl Status {
    pub(super) fn byte(self) -> u8 {
        let code = match self {
            Status::Ok => blk::VIRTIO_BLK_S_OK,
            Status::Error => blk::VIRTIO_BLK_S_IOERR,
            Status::Unsupported => blk::VIRTIO_BLK_S_UNSUPP,
        };
        code.to_le_bytes()[0]
    }
}

/// `struct virtio_blk_req` without its data.
#[derive(FromBytes)]
#[repr(C)]
struct Header {
    kind: U32,
    _reserved: U32,
    sector: U64,
}

/// `struct virtio_blk_discard_write_zeroes`
#[derive(FromBytes)]
#[repr(C)]
struct Segment {
    sector: U64,
    sectors: U32,
    flags: U32,
}

const HEADER: usize = size_of::<Header>();
const SEGMENT: usize = size_of::<Segment>();

/// Bytes of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// Their room may be given back, too.
    pub(super) unmap: bool,
}

/// What is to be done.
#[derive(Debug)]
pub(super) enum Action {
    /// From the disk at this offset into `Request::to_guest`.
    Read(u64),
    /// From `Request::from_guest` to the disk at this offset.
    Write(u64),
    Flush,
    Identify,
    Discard(VecDeque<Range>),
    Zero(VecDeque<Range>),
}

/// What a driver may ask for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Offer {
    /// Length of the disk.
    pub(super) bytes: u64,
    pub(super) writable: bool,
    /// These were negotiated.
    pub(super) discards: bool,
    pub(super) zeroes: bool,
}

/// A request that the device has taken.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) head: u16,
    pub(super) from_guest: Buffers,
    pub(super) to_guest: Buffers,
    /// Where the status goes: the last byte for the device to write.
    status: GuestAddress,
}

impl Request {
    /// What a chain of descriptors names, which may be anything.
    ///
    /// # Errors
    /// When there is no place for a status, so that the driver cannot be told of it, or when the
    /// chain has more descriptors than it may.
    pub(super) fn new(chain: DescriptorChain<&GuestMemoryMmap>) -> Result<Request, Broken> {
        let Chain { head, from_guest, mut to_guest } = Chain::new(chain, QUEUE_SIZE)?;
        let status = to_guest.pop_byte().ok_or(Broken)?;
        Ok(Request { head, from_guest, to_guest, status })
    }

    /// What the driver wants.
    ///
    /// # Errors
    /// What to answer to a request that cannot be done.
    pub(super) fn action(
        &mut self,
        memory: &GuestMemoryMmap,
        offer: Offer,
    ) -> Result<Action, Status> {
        let mut bytes = [0; HEADER];
        self.from_guest.read(memory, &mut bytes)?;
        let header = Header::read_from_bytes(&bytes).map_err(|_| Status::Error)?;
        let sector = header.sector.get();
        match header.kind.get() {
            blk::VIRTIO_BLK_T_IN => Ok(Action::Read(offer.within(sector, self.to_guest.length)?)),
            blk::VIRTIO_BLK_T_OUT if !offer.writable => Err(Status::Error),
            blk::VIRTIO_BLK_T_OUT => {
                Ok(Action::Write(offer.within(sector, self.from_guest.length)?))
            }
            blk::VIRTIO_BLK_T_FLUSH => Ok(Action::Flush),
            blk::VIRTIO_BLK_T_GET_ID => Ok(Action::Identify),
            blk::VIRTIO_BLK_T_DISCARD if offer.discards => {
                // The only flag there is means nothing here.
                Ok(Action::Discard(self.ranges(memory, offer, 0)?))
            }
            blk::VIRTIO_BLK_T_WRITE_ZEROES if offer.zeroes => {
                let flags = blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
                Ok(Action::Zero(self.ranges(memory, offer, flags)?))
            }
            _ => Err(Status::Unsupported),
        }
    }

    fn ranges(
        &mut self,
        memory: &GuestMemoryMmap,
        offer: Offer,
        flags: u32,
    ) -> Result<VecDeque<Range>, Status> {
        let (length, each) = (self.from_guest.length, SEGMENT as u64);
        let count = length / each;
        if count == 0 || count > MAX_RANGES.into() || !length.is_multiple_of(each) {
            return Err(Status::Error);
        }
        let mut ranges = VecDeque::new();
        for _ in 0..count {
            let mut bytes = [0; SEGMENT];
            self.from_guest.read(memory, &mut bytes)?;
            let segment = Segment::read_from_bytes(&bytes).map_err(|_| Status::Error)?;
            let (sectors, has) = (segment.sectors.get(), segment.flags.get());
            if has & !flags != 0 {
                return Err(Status::Unsupported);
            }
            if sectors > MAX_RANGE {
                return Err(Status::Error);
            }
            let bytes = u64::from(sectors) * SECTOR;
            let offset = offer.within(segment.sector.get(), bytes)?;
            if bytes > 0 {
                let unmap = has & blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
                ranges.push_back(Range { offset, bytes, unmap });
            }
        }
        Ok(ranges)
    }

    /// Tells the driver of the end; how many bytes were written for it from the beginning on
    /// (section 2.7.8.2).
    ///
    /// # Errors
    /// When it has named no memory for that.
    pub(super) fn answer(&self, memory: &GuestMemoryMmap, status: Status) -> Result<u32, Broken> {
        memory.write_obj(status.byte(), self.status).map_err(|_| Broken)?;
        let whole = u64::from(self.to_guest.length == 0);
        Ok(u32::try_from(self.to_guest.moved() + whole).unwrap_or(u32::MAX))
    }
}

impl Offer {
    /// The offset of a sector in bytes, if so many bytes from there on are sectors of the disk.
    fn within(self, sector: u64, bytes: u64) -> Result<u64, Status> {
        let offset = sector.checked_mul(SECTOR).ok_or(Status::Error)?;
        let end = offset.checked_add(bytes).ok_or(Status::Error)?;
        let is_whole = bytes.is_multiple_of(SECTOR);
        if is_whole && end <= self.bytes { Ok(offset) } else { Err(Status::Error) }
    }
}
