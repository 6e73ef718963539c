//! The exits of a module, by its code in memory, before anything of it has run.
//!
//! Stubs are behind the kernel, which modules do not reach: a window leads to a relay before that.
//! So an instruction that depends on its place stays where it is. Code that is freed after start-up
//! lends no room to other code.

use super::plan::Planner;
use super::targets::Targets;
use super::text::Text;
use super::windows::Windows;
use crate::exits::module::{ModuleExits, ModuleRewrite, ModuleText};
use crate::exits::{After, Exit, ExitKind};
use crate::read::index;

/// What to rewrite for the functions that are asked for. `entry` reads the tables of jumps.
///
/// # Errors
/// What about the module is absurd.
pub(crate) fn find(
    module: &ModuleText,
    entry: &dyn Fn(u64) -> Option<i32>,
) -> Result<ModuleExits, &'static str> {
    const UNKNOWN: &str = "its code is at an odd place";
    let regions = module.regions.iter();
    let regions = regions.map(|(start, bytes)| Text::of_module(*start, bytes, &module.pieces));
    let regions: Vec<Text<'_>> = regions.collect::<Option<_>>().ok_or(UNKNOWN)?;
    let mut found = ModuleExits::default();
    for text in &regions {
        let targets = Targets::of_module(module, text, &regions, entry)?;
        add(&mut found, module, text, &targets);
    }
    found.list.sort_unstable_by_key(|exit| exit.address);
    found.rewrites.sort_by_key(|rewrite| rewrite.exit.epilogue.start);
    Ok(found)
}

fn add(found: &mut ModuleExits, module: &ModuleText, text: &Text<'_>, targets: &Targets) {
    let mut windows = Windows::default();
    // Numbers are those of pieces, which are ascending as addresses are.
    for (number, piece) in (0..).zip(&module.pieces) {
        if piece.site.is_some() && text.range.contains(&piece.start) && piece.start % 2 == 0 {
            windows.add_function(text, targets, number, piece.start);
        }
    }
    let piece = |number: u32| module.pieces.get(index(number.into()));
    let site = |number| piece(number).and_then(|piece| piece.site).map(|(site, _)| site);
    let is_wanted =
        |number| site(number).is_some_and(|it| module.wanted.binary_search(&it).is_ok());
    let wanted = windows.functions.iter().map(|function| function.site).filter(|&it| is_wanted(it));
    let wanted: Vec<u32> = wanted.collect();
    let plan = Planner::new(&windows, wanted.iter().map(|&number| index(number.into()))).finish();
    for function in windows.functions.iter().filter(|function| is_wanted(function.site)) {
        let number = index(function.site.into());
        let fixed = windows.fixed_of(number).map(|left_out| left_out.why).next();
        let left_out = plan.left_out.iter().find(|left_out| left_out.site == function.site);
        let why = function.missing.or(fixed).or(left_out.map(|left_out| left_out.why));
        if let Some((why, site)) = why.zip(site(function.site)) {
            found.missing.push((site, why.into()));
        }
    }
    for exit in plan.exits {
        let number = exit.epilogue.site;
        let original = exit.ranges().map(|(at, len)| Some(text.bytes(at, len)?.to_vec()));
        let Some(original) = original.collect::<Option<Vec<_>>>() else { continue };
        if let Some((piece, site)) = piece(number).zip(site(number)).filter(|_| !exit.helper) {
            found.list.push(Exit {
                address: exit.epilogue.ret,
                function: piece.start,
                site,
                kind: ExitKind::Return,
                after: After::Nothing,
            });
        }
        found.rewrites.push(ModuleRewrite { exit, original });
    }
}
