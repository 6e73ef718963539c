//! The device tree: what the guest is told about its machine.

use vm_fdt::{Error, FdtReserveEntry, FdtWriter};

use super::isa::Isa;
use super::layout;
use crate::devices::virtio::MmioTransport;
use crate::devices::{Plic, PvPanic, SerialPort};
use crate::machine::board::VirtioSlot;

/// What [`tree`] puts into words.
pub(super) struct Description<'a> {
    pub(super) cpus: u32,
    /// Start and length of each piece of RAM.
    pub(super) ram: &'a [(u64, u64)],
    /// Address and length.
    pub(super) annex: Option<(u64, u64)>,
    pub(super) cmdline: &'a str,
    /// Address and length.
    pub(super) initrd: Option<(u64, u64)>,
    /// Rate of `time` in Hz.
    pub(super) timebase: u32,
    pub(super) isa: &'a Isa,
    pub(super) wiring: Wiring,
    pub(super) virtio: &'a [VirtioSlot],
    /// Random bytes for the guest's first random numbers.
    pub(super) seed: &'a [u8],
}

/// How interrupts of devices get to harts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wiring {
    /// By an APLIC, which sends messages to IMSICs.
    Aia {
        /// Number of messages that an IMSIC knows.
        ids: u32,
    },
    /// By a PLIC.
    Plic,
}

// Names of nodes for other nodes.
const APLIC: u32 = 1;
const IMSICS: u32 = 2;
const PLIC: u32 = 3;
const HARTS: u32 = 0x100;

/// Interrupts of a hart, by their numbers in `scause`.
const SUPERVISOR_EXTERNAL: u32 = 9;
/// In an APLIC's words: level-triggered, active high.
const LEVEL_HIGH: u32 = 4;

/// Input clock of the serial ports in Hz, that of a PC: nothing takes as long as a baud rate says.
const UART_CLOCK: u32 = 1_843_200;

/// The flattened tree.
pub(super) fn tree(machine: &Description<'_>) -> Result<Vec<u8>, Error> {
    let mut fdt = FdtWriter::new_with_mem_reserv(&[] as &[FdtReserveEntry])?;
    let root = fdt.begin_node("")?;
    fdt.property_string("compatible", "linux,dummy-virt")?;
    fdt.property_string("model", "vmtrace")?;
    fdt.property_u32("#address-cells", 2)?;
    fdt.property_u32("#size-cells", 2)?;
    chosen(&mut fdt, machine)?;
    aliases(&mut fdt)?;
    for (start, length) in machine.ram {
        let node = fdt.begin_node(&format!("memory@{start:x}"))?;
        fdt.property_string("device_type", "memory")?;
        fdt.property_array_u64("reg", &[*start, *length])?;
        fdt.end_node(node)?;
    }
    reserved_memory(&mut fdt, machine)?;
    cpus(&mut fdt, machine)?;
    let soc = fdt.begin_node("soc")?;
    fdt.property_string("compatible", "simple-bus")?;
    fdt.property_u32("#address-cells", 2)?;
    fdt.property_u32("#size-cells", 2)?;
    fdt.property_null("ranges")?;
    let parent = match machine.wiring {
        Wiring::Aia { ids } => aia(&mut fdt, machine, ids)?,
        Wiring::Plic => plic(&mut fdt, machine)?,
    };
    serial(&mut fdt, machine, parent, layout::UART0, layout::UART0_IRQ)?;
    serial(&mut fdt, machine, parent, layout::UART1, layout::UART1_IRQ)?;
    let node = fdt.begin_node(&format!("pvpanic@{:x}", layout::PVPANIC))?;
    fdt.property_string("compatible", "qemu,pvpanic-mmio")?;
    fdt.property_array_u64("reg", &[layout::PVPANIC, PvPanic::LENGTH])?;
    fdt.end_node(node)?;
    for slot in machine.virtio {
        let node = fdt.begin_node(&format!("virtio_mmio@{:x}", slot.base))?;
        fdt.property_string("compatible", "virtio,mmio")?;
        fdt.property_array_u64("reg", &[slot.base.into(), MmioTransport::LENGTH.into()])?;
        fdt.property_null("dma-coherent")?;
        interrupt(&mut fdt, machine, parent, slot.irq)?;
        fdt.end_node(node)?;
    }
    fdt.end_node(soc)?;
    fdt.end_node(root)?;
    fdt.finish()
}

fn chosen(fdt: &mut FdtWriter, machine: &Description<'_>) -> Result<(), Error> {
    let node = fdt.begin_node("chosen")?;
    fdt.property_string("bootargs", machine.cmdline)?;
    fdt.property_string("stdout-path", "serial0")?;
    fdt.property("rng-seed", machine.seed)?;
    if let Some((start, length)) = machine.initrd {
        fdt.property_u64("linux,initrd-start", start)?;
        fdt.property_u64("linux,initrd-end", start + length)?;
    }
    fdt.end_node(node)
}

/// Which serial port is ttyS0 and which ttyS1.
fn aliases(fdt: &mut FdtWriter) -> Result<(), Error> {
    let node = fdt.begin_node("aliases")?;
    fdt.property_string("serial0", &format!("/soc/serial@{:x}", layout::UART0))?;
    fdt.property_string("serial1", &format!("/soc/serial@{:x}", layout::UART1))?;
    fdt.end_node(node)
}

/// The annex is no RAM, and nobody shall think that it is free.
fn reserved_memory(fdt: &mut FdtWriter, machine: &Description<'_>) -> Result<(), Error> {
    let Some((start, length)) = machine.annex else { return Ok(()) };
    let node = fdt.begin_node("reserved-memory")?;
    fdt.property_u32("#address-cells", 2)?;
    fdt.property_u32("#size-cells", 2)?;
    fdt.property_null("ranges")?;
    let annex = fdt.begin_node(&format!("annex@{start:x}"))?;
    fdt.property_array_u64("reg", &[start, length])?;
    fdt.property_null("no-map")?;
    fdt.end_node(annex)?;
    fdt.end_node(node)
}

fn cpus(fdt: &mut FdtWriter, machine: &Description<'_>) -> Result<(), Error> {
    let isa = machine.isa;
    let node = fdt.begin_node("cpus")?;
    fdt.property_u32("#address-cells", 1)?;
    fdt.property_u32("#size-cells", 0)?;
    fdt.property_u32("timebase-frequency", machine.timebase)?;
    for hart in 0..machine.cpus {
        let cpu = fdt.begin_node(&format!("cpu@{hart:x}"))?;
        fdt.property_string("device_type", "cpu")?;
        fdt.property_string("compatible", "riscv")?;
        fdt.property_u32("reg", hart)?;
        fdt.property_string("status", "okay")?;
        fdt.property_string("mmu-type", isa.mmu_type())?;
        fdt.property_string("riscv,isa", &isa.string())?;
        fdt.property_string("riscv,isa-base", "rv64i")?;
        let names = isa.extensions.iter().map(|name| (*name).to_owned()).collect();
        fdt.property_string_list("riscv,isa-extensions", names)?;
        for (name, size) in
            [("riscv,cbom-block-size", isa.cbom_block), ("riscv,cboz-block-size", isa.cboz_block)]
        {
            if let Some(size) = size.and_then(|size| u32::try_from(size).ok()) {
                fdt.property_u32(name, size)?;
            }
        }
        let controller = fdt.begin_node("interrupt-controller")?;
        fdt.property_string("compatible", "riscv,cpu-intc")?;
        fdt.property_null("interrupt-controller")?;
        fdt.property_u32("#interrupt-cells", 1)?;
        fdt.property_phandle(HARTS + hart)?;
        fdt.end_node(controller)?;
        fdt.end_node(cpu)?;
    }
    fdt.end_node(node)
}

/// The external interrupt of every hart.
fn all_harts(machine: &Description<'_>) -> Vec<u32> {
    (0..machine.cpus).flat_map(|hart| [HARTS + hart, SUPERVISOR_EXTERNAL]).collect()
}

fn aia(fdt: &mut FdtWriter, machine: &Description<'_>, ids: u32) -> Result<u32, Error> {
    let size = u64::from(kvm_bindings::KVM_DEV_RISCV_IMSIC_SIZE) * u64::from(machine.cpus);
    let node = fdt.begin_node(&format!("imsics@{:x}", layout::IMSIC))?;
    fdt.property_string("compatible", "riscv,imsics")?;
    fdt.property_array_u64("reg", &[layout::IMSIC, size])?;
    fdt.property_null("interrupt-controller")?;
    fdt.property_u32("#interrupt-cells", 0)?;
    fdt.property_null("msi-controller")?;
    fdt.property_u32("#msi-cells", 0)?;
    fdt.property_array_u32("interrupts-extended", &all_harts(machine))?;
    fdt.property_u32("riscv,num-ids", ids)?;
    fdt.property_phandle(IMSICS)?;
    fdt.end_node(node)?;

    let node = fdt.begin_node(&format!("interrupt-controller@{:x}", layout::APLIC))?;
    fdt.property_string("compatible", "riscv,aplic")?;
    let size = u64::from(kvm_bindings::KVM_DEV_RISCV_APLIC_SIZE);
    fdt.property_array_u64("reg", &[layout::APLIC, size])?;
    fdt.property_null("interrupt-controller")?;
    fdt.property_u32("#interrupt-cells", 2)?;
    fdt.property_u32("msi-parent", IMSICS)?;
    fdt.property_u32("riscv,num-sources", layout::LAST_IRQ)?;
    fdt.property_phandle(APLIC)?;
    fdt.end_node(node)?;
    Ok(APLIC)
}

fn plic(fdt: &mut FdtWriter, machine: &Description<'_>) -> Result<u32, Error> {
    let node = fdt.begin_node(&format!("interrupt-controller@{:x}", layout::PLIC))?;
    fdt.property_string_list(
        "compatible",
        vec!["sifive,plic-1.0.0".to_owned(), "riscv,plic0".to_owned()],
    )?;
    fdt.property_array_u64("reg", &[layout::PLIC, Plic::LENGTH])?;
    fdt.property_null("interrupt-controller")?;
    fdt.property_u32("#interrupt-cells", 1)?;
    fdt.property_u32("#address-cells", 0)?;
    fdt.property_array_u32("interrupts-extended", &all_harts(machine))?;
    fdt.property_u32("riscv,ndev", layout::LAST_IRQ)?;
    fdt.property_phandle(PLIC)?;
    fdt.end_node(node)?;
    Ok(PLIC)
}

fn interrupt(
    fdt: &mut FdtWriter,
    machine: &Description<'_>,
    parent: u32,
    irq: u32,
) -> Result<(), Error> {
    fdt.property_u32("interrupt-parent", parent)?;
    match machine.wiring {
        Wiring::Aia { .. } => fdt.property_array_u32("interrupts", &[irq, LEVEL_HIGH]),
        Wiring::Plic => fdt.property_u32("interrupts", irq),
    }
}

fn serial(
    fdt: &mut FdtWriter,
    machine: &Description<'_>,
    parent: u32,
    base: u64,
    irq: u32,
) -> Result<(), Error> {
    let node = fdt.begin_node(&format!("serial@{base:x}"))?;
    fdt.property_string("compatible", "ns16550a")?;
    fdt.property_array_u64("reg", &[base, SerialPort::LENGTH])?;
    fdt.property_u32("clock-frequency", UART_CLOCK)?;
    interrupt(fdt, machine, parent, irq)?;
    fdt.end_node(node)
}

#[cfg(test)]
#[path = "fdt_tests.rs"]
mod tests;
