//! Stops of vCPUs in a program, at a call that it has counted down to.

use super::dispatch;
use super::error::TraceError;
use super::exits::AllExits;
use super::guest::Guest;
use super::trace::{Attachment, exits_of};
use crate::kernel::Kernel;

/// A vCPU that stands in a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// The number of the stop.
    pub number: u16,
    /// Where it goes on with what it had begun.
    pub next: u64,
    /// Whether a function is left there, and none is entered.
    pub at_end: bool,
}

impl Attachment {
    /// Lets programs stop vCPUs by this from now on.
    pub fn stop_by(&mut self, trap: &'static [u8]) {
        self.trap = trap;
    }

    /// What a vCPU stopped for that stands at this run-time address, if it is one of these.
    #[must_use]
    pub fn stopped(&self, address: u64) -> Option<Stopped> {
        let (stop, next) = self.code.stops().find(address)?;
        Some(Stopped { number: stop.number, next, at_end: stop.at_end })
    }

    /// Run-time addresses at which programs stop vCPUs.
    pub fn program_traps(&self) -> impl Iterator<Item = u64> {
        self.code.stops().traps()
    }

    /// Which of these sites (indices, or numbers of those of modules) `told` names: what a vCPU that
    /// stands in a program at an entry has in the register for it.
    #[must_use]
    pub fn site_told(&self, kernel: &Kernel, sites: &[usize], told: u64) -> Option<usize> {
        let target = dispatch::of(kernel.arch());
        let is_told = |site: &usize| {
            let spot = self.modules.spot(kernel, &self.image, *site);
            spot.is_some_and(|spot| self.image.runtime(target.return_address(&spot.site)) == told)
        };
        sites.iter().copied().find(is_told)
    }

    /// The same of a program where one of their functions is left: of exits that are held. `sites` are in order.
    ///
    /// # Errors
    /// When the kernel's exits are not known, or guest memory cannot be used.
    pub fn exit_told(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        sites: &[usize],
        told: u64,
    ) -> Result<Option<usize>, TraceError> {
        let all = AllExits { kernel: exits_of(kernel)?, modules: &self.modules };
        let theirs = self.exits.with_programs().filter_map(|held| {
            let site = all.get(held.0)?.site as usize;
            sites.binary_search(&site).is_ok().then_some((site, held))
        });
        let (of, exits): (Vec<usize>, Vec<_>) = theirs.unzip();
        // All have their stubs.
        let words = self.stubs(guest, kernel, &exits)?;
        let is_it = |word: u32| u64::from(word) == told & u64::from(u32::MAX);
        let mut named =
            of.into_iter().zip(words).filter_map(|(of, word)| is_it(word?.word).then_some(of));
        Ok(named.next())
    }

    /// From where a vCPU that has stopped at this address, called by `site`, does what the site does
    /// by now. `None` where the site is not held, where a function is left, or that cannot be.
    #[must_use]
    pub fn again(&self, address: u64, site: usize) -> Option<u64> {
        let (stop, _) = self.code.stops().find(address).filter(|(stop, _)| !stop.at_end)?;
        let (_, program) = self.sites().find(|&(held, _)| held == site)?;
        self.code.again(program, stop.call)
    }
}
