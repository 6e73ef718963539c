//! ACPI tables: hardware-reduced ACPI, which has no fixed hardware to emulate but a sleep register.
//!
//! Everything that a kernel would otherwise spend time looking for is said not to be there:
//! keyboard controller, CMOS clock, VGA.

use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, aml};

use super::layout;
use crate::devices::virtio::MmioTransport;
use crate::devices::{PowerControl, PvPanic};
use crate::machine::board::VirtioSlot;

const OEM_ID: [u8; 6] = *b"VMTRAC";
const OEM_TABLE_ID: [u8; 8] = *b"VMTRACE ";
const OEM_REVISION: u32 = 1;
/// Of a DSDT: 2 and more means 64-bit integers.
const DSDT_REVISION: u8 = 2;
/// Length of a table without contents.
const HEADER: u32 = 36;

/// `IAPC_BOOT_ARCH`: no VGA to probe, no CMOS clock. That bit 1 is clear says: no 8042.
const BOOT_ARCH: u16 = 1 << 2 | 1 << 5;

/// All tables as they are put at [`layout::ACPI`], the root pointer first.
pub(super) fn tables(cpus: u8, virtio: &[VirtioSlot]) -> Vec<u8> {
    let mut area = Area { bytes: vec![0; Rsdp::len()] };
    let dsdt = area.append(dsdt(virtio).as_slice());
    let fadt = area.append_aml(&fadt(dsdt));
    let madt = area.append_aml(&madt(cpus));
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = area.append_aml(&xsdt);
    let mut rsdp = Vec::new();
    Rsdp::new(OEM_ID, xsdt).to_aml_bytes(&mut rsdp);
    area.bytes[..rsdp.len()].copy_from_slice(&rsdp);
    area.bytes
}

/// Tables behind each other, at addresses divisible by 16.
struct Area {
    bytes: Vec<u8>,
}

impl Area {
    /// Returns the guest-physical address.
    fn append(&mut self, table: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let address = layout::ACPI + self.bytes.len() as u64;
        self.bytes.extend_from_slice(table);
        address
    }

    fn append_aml(&mut self, table: &dyn Aml) -> u64 {
        let mut bytes = Vec::new();
        table.to_aml_bytes(&mut bytes);
        self.append(&bytes)
    }
}

fn fadt(dsdt: u64) -> acpi_tables::fadt::FADT {
    let register = |offset| {
        let address = u64::from(layout::POWER) + offset;
        GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, address)
    };
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        // No fixed buttons: without these flags kernels look for their hardware.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::Headless);
    fadt.iapc_boot_arch = BOOT_ARCH.into();
    fadt.reset_reg = register(PowerControl::RESET);
    fadt.reset_value = PowerControl::RESET_VALUE;
    fadt.sleep_control_reg = register(PowerControl::SLEEP_CONTROL);
    fadt.sleep_status_reg = register(PowerControl::SLEEP_STATUS);
    fadt.finalize()
}

fn madt(cpus: u8) -> MADT {
    let local = LocalInterruptController::Address(layout::LOCAL_APIC);
    let mut madt = MADT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION, local);
    for id in 0..cpus {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, layout::IO_APIC, 0));
    madt
}

fn dsdt(virtio: &[VirtioSlot]) -> Sdt {
    let mut aml = Vec::new();
    let off = PowerControl::SLEEP_TYPE_OFF;
    let (zero, type_off) = (aml::ZERO, off);
    aml::Name::new("_S5_".into(), &aml::Package::new(vec![&type_off, &zero, &zero, &zero]))
        .to_aml_bytes(&mut aml);
    serial(&mut aml, "_SB_.COM1", 0, layout::COM1, layout::COM1_GSI);
    serial(&mut aml, "_SB_.COM2", 1, layout::COM2, layout::COM2_GSI);
    pvpanic(&mut aml);
    for (index, slot) in (0_u8..).zip(virtio) {
        virtio_mmio(&mut aml, index, *slot);
    }
    let mut dsdt = Sdt::new(*b"DSDT", HEADER, DSDT_REVISION, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    dsdt.append_slice(&aml);
    dsdt
}

/// An edge-triggered, active-high interrupt.
fn interrupt(gsi: u32) -> aml::Interrupt {
    let (consumer, edge, active_low, shared) = (true, true, false, false);
    aml::Interrupt::new(consumer, edge, active_low, shared, gsi)
}

fn serial(sink: &mut Vec<u8>, path: &str, uid: u8, port: u16, gsi: u32) {
    aml::Device::new(
        path.into(),
        vec![
            &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0501")),
            &aml::Name::new("_UID".into(), &uid),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(vec![&aml::IO::new(port, port, 1, 8), &interrupt(gsi)]),
            ),
        ],
    )
    .to_aml_bytes(sink);
}

fn pvpanic(sink: &mut Vec<u8>) {
    const { assert!(PvPanic::LENGTH == 1) };
    let port = layout::PVPANIC;
    aml::Device::new(
        "_SB_.PEVT".into(),
        vec![
            &aml::Name::new("_HID".into(), &"QEMU0001"),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(vec![&aml::IO::new(port, port, 1, 1)]),
            ),
        ],
    )
    .to_aml_bytes(sink);
}

fn virtio_mmio(sink: &mut Vec<u8>, index: u8, slot: VirtioSlot) {
    aml::Device::new(
        format!("_SB_.V{index:03}").as_str().into(),
        vec![
            &aml::Name::new("_HID".into(), &"LNRO0005"),
            &aml::Name::new("_UID".into(), &index),
            // Cache-coherent, as everything here.
            &aml::Name::new("_CCA".into(), &aml::ONE),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(vec![
                    &aml::Memory32Fixed::new(true, slot.base, MmioTransport::LENGTH),
                    &interrupt(slot.irq),
                ]),
            ),
        ],
    )
    .to_aml_bytes(sink);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    fn table(bytes: &[u8], address: u64) -> &[u8] {
        let start = usize::try_from(address - layout::ACPI).unwrap();
        let length = u32::from_le_bytes(bytes[start + 4..start + 8].try_into().unwrap());
        &bytes[start..start + usize::try_from(length).unwrap()]
    }

    fn word(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    #[test]
    fn every_table_is_found_and_sums_to_zero() {
        let slots = [VirtioSlot { base: 0xf000_0000, irq: 16 }];
        for (cpus, virtio) in [(1, &[][..]), (8, &slots), (255, &slots)] {
            let bytes = tables(cpus, virtio);
            assert!(bytes.len() as u64 <= layout::RESET_VECTOR - layout::ACPI);
            assert_eq!(&bytes[..8], b"RSD PTR ");
            assert_eq!((sum(&bytes[..20]), sum(&bytes[..36])), (0, 0));
            let xsdt = table(&bytes, word(&bytes, 24));
            assert_eq!((&xsdt[..4], sum(xsdt), xsdt.len()), (&b"XSDT"[..], 0, 36 + 16));
            let fadt = table(&bytes, word(xsdt, 36));
            assert_eq!((&fadt[..4], sum(fadt), fadt.len()), (&b"FACP"[..], 0, 276));
            let madt = table(&bytes, word(xsdt, 44));
            assert_eq!((&madt[..4], sum(madt)), (&b"APIC"[..], 0));
            assert_eq!(madt.len(), 44 + usize::from(cpus) * 8 + 12);
            let dsdt = table(&bytes, word(fadt, 140));
            assert_eq!((&dsdt[..4], sum(dsdt)), (&b"DSDT"[..], 0));
        }
    }

    #[test]
    fn power_and_reset_registers_are_where_the_device_is() {
        let bytes = tables(1, &[]);
        let xsdt = table(&bytes, word(&bytes, 24));
        let fadt = table(&bytes, word(xsdt, 36));
        let gas = |at: usize| (fadt[at], word(fadt, at + 4));
        assert_eq!(gas(116), (1, 0x602)); // reset register, an I/O port
        assert_eq!(fadt[128], PowerControl::RESET_VALUE);
        assert_eq!(gas(244), (1, 0x600)); // sleep control
        assert_eq!(gas(256), (1, 0x601)); // sleep status
        let flags = u32::from_le_bytes(fadt[112..116].try_into().unwrap());
        assert_eq!(flags & (1 << 20 | 1 << 10), 1 << 20 | 1 << 10);
    }
}
