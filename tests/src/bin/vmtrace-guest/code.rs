//! Dumps the current code of the guest: the kernel's own, and that in the annex (x86-64).

use super::stress;
use anyhow::{Context, Result, bail};
use std::fs;
use std::os::fd::AsRawFd;

/// Where the annex is in the guest's physical and in its virtual memory.
const ANNEX: [u64; 2] = [0xc000_0000, 0xffff_ffff_8000_0000];
const PAGE: u64 = 4096;
/// Bytes of a program that are shown.
const LEN: usize = 512;

/// Prints what the kernel says of faults of its processor, 5 bytes of its code at each of these distances
/// from its beginning, and the program that the site at `site` calls.
pub(crate) fn code(site: &str, others: &[&str]) -> Result<()> {
    for entry in fs::read_dir("/sys/devices/system/cpu/vulnerabilities")? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        println!("vulnerability {name} {}", fs::read_to_string(&path)?.trim());
    }
    let text = stress::text()?;
    let bytes = |at: &str| -> Result<&[u8]> {
        let at = usize::from_str_radix(at, 16)?;
        text.get(at..at + 5).context("beyond the kernel's code")
    };
    for at in others {
        println!("code {at} {}", hex(bytes(at)?));
    }
    let &[0xe8, a, b, c, d] = bytes(site)? else { bail!("no call at {site}") };
    let distance = i64::from(i32::from_le_bytes([a, b, c, d])) + 5;
    // The kernel is where it is linked.
    let start = ANNEX[1] + (16 << 20) + u64::from_str_radix(site, 16)?;
    let program = start.wrapping_add_signed(distance).wrapping_sub(ANNEX[1]);
    println!("program {program:x} {}", hex(&annex(program)?));
    Ok(())
}

fn annex(offset: u64) -> Result<Vec<u8>> {
    let memory = fs::File::open("/dev/mem")?;
    let (page, within) = (offset / PAGE * PAGE, usize::try_from(offset % PAGE)?);
    let len = usize::try_from(2 * PAGE)?;
    let place = libc::off_t::try_from(ANNEX[0] + page)?;
    // SAFETY: a new mapping of memory that is no RAM of the guest's, read only.
    let start = unsafe {
        let (flags, fd) = (libc::MAP_SHARED, memory.as_raw_fd());
        libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, flags, fd, place)
    };
    if start == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error()).context("/dev/mem");
    }
    // SAFETY: within two pages that stay mapped; `within` and LEN are less than one each.
    let bytes =
        (within..within + LEN).map(|at| unsafe { start.cast::<u8>().add(at).read_volatile() });
    Ok(bytes.collect())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
