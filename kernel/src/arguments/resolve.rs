//! Resolves a path to the value that it names.

use super::super::btf::{Int, Kind, Seen};
use super::convention::Place;
use super::path::{Path, Step};
use super::types::{Letters, Types};
use super::{
    Fetch, Kernel, Last, ModuleTypes, Near, NoPrototype, PathError, PathProblem, Shape, Signature,
    Source, Value,
};

/// A value on the way, which has an address or a place in words.
#[derive(Clone, Debug)]
struct Cursor {
    base: Base,
    /// From the base, in bits.
    bits: u64,
    /// If it is a bit field, how many bits it has; otherwise 0.
    width: u32,
    number: u32,
}

#[derive(Clone, Debug)]
enum Base {
    Words { first: u8, count: u8, result: bool },
    Memory { from: Source, hops: Vec<i32> },
}

impl Kernel {
    /// One value of the function at a site, by its index in [`Kernel::sites`]:
    /// `[LABEL=]NAME(('->'|'.')MEMBER | '[' N ']')*[:MAX]`.
    ///
    /// NAME is a parameter, `$ret` what the function returns, and so is `retval` if there is no
    /// parameter of that name. `.` behind a pointer follows it, as `->` does; members of unnamed
    /// structs and unions count as the outer one's own. `char` arrays and pointers to `char` are
    /// text, up to MAX bytes, or 64; those of other types of one byte are with MAX. Structs and
    /// arrays as a whole have at most 64 bytes.
    ///
    /// # Errors
    /// The place in the text and what is wrong there.
    pub fn path(&self, site: usize, text: &str) -> Result<Value, PathError> {
        let path = Path::parse(text)?;
        let (types, signature) = self.signature(site).map_err(|why| {
            let name = self.sites().get(site).and_then(|site| self.site_name(site));
            let function = name.unwrap_or("the function").to_owned();
            path.error(&(0..text.len()), PathProblem::NoPrototype { function, why })
        })?;
        types.path(&signature, &path)
    }

    /// The same of a function of a module, by its names and the module's types, if there are any.
    ///
    /// # Errors
    /// As those of [`Kernel::path`].
    pub fn module_path<'n>(
        &self,
        types: Option<&ModuleTypes>,
        mut names: impl Iterator<Item = &'n str> + Clone,
        text: &str,
    ) -> Result<Value, PathError> {
        let path = Path::parse(text)?;
        let types = types.ok_or(NoPrototype::NoTypes);
        let found = types.and_then(|types| self.signature_in(types.scope(), names.clone()));
        let (types, signature) = found.map_err(|why| {
            let function = names.next().unwrap_or("the function").to_owned();
            path.error(&(0..text.len()), PathProblem::NoPrototype { function, why })
        })?;
        types.path(&signature, &path)
    }

    /// The same of a function by its name, whether it has a site or not.
    pub(in super::super) fn path_of_name(
        &self,
        name: &str,
        text: &str,
    ) -> Result<Value, PathError> {
        let path = Path::parse(text)?;
        let (types, signature) = self.signature_of([name].into_iter()).map_err(|why| {
            let function = name.to_owned();
            path.error(&(0..text.len()), PathProblem::NoPrototype { function, why })
        })?;
        types.path(&signature, &path)
    }
}

impl Types<'_> {
    fn path(&self, signature: &Signature<'_>, path: &Path<'_>) -> Result<Value, PathError> {
        let mut at = path.name.1.clone();
        let mut cursor =
            self.start(signature, path.name.0).map_err(|problem| path.error(&at, problem))?;
        for (step, part) in &path.steps {
            at = part.clone();
            cursor = self.step(cursor, *step).map_err(|problem| path.error(&at, problem))?;
        }
        let max = path.max.as_ref().map(|(max, _)| *max);
        let (fetch, shape) = self.end(cursor, max).map_err(|problem| {
            let of_length = matches!(problem, PathProblem::NotText { .. });
            let length = path.max.as_ref().filter(|_| of_length).map(|(_, part)| part);
            path.error(length.unwrap_or(&at), problem)
        })?;
        Ok(Value { name: path.shown.to_owned(), fetch, shape })
    }

    fn start(&self, signature: &Signature<'_>, name: &str) -> Result<Cursor, PathProblem> {
        let parameters = || signature.parameters.iter().enumerate();
        let own = parameters().find(|(_, parameter)| parameter.name == name);
        // Those without a name go by their numbers.
        let by_number = || parameters().find(|(i, parameter)| parameter.name(*i) == name);
        let function = || signature.function.clone();
        let (number, place, result) = match own.or_else(by_number) {
            Some((_, parameter)) => (parameter.number, parameter.place, false),
            None if matches!(name, "$ret" | "retval") => {
                (signature.result, signature.returned, true)
            }
            None => {
                let names: Vec<String> = parameters().map(|(i, own)| own.name(i)).collect();
                let names = Near::to(name, names.iter().map(String::as_str));
                return Err(PathProblem::Parameter { function: function(), names });
            }
        };
        let base = match place {
            Place::Words { first, count } => Base::Words { first, count, result },
            Place::Reference(first) => {
                Base::Memory { from: source(first, result), hops: Vec::new() }
            }
            Place::Nowhere if result => return Err(PathProblem::NoResult { function: function() }),
            Place::Nowhere => {
                return Err(PathProblem::NoValue { of: self.btf.describe(number) });
            }
        };
        Ok(Cursor { base, bits: 0, width: 0, number })
    }

    fn step(&self, cursor: Cursor, step: Step<'_>) -> Result<Cursor, PathProblem> {
        match step {
            Step::Arrow(name) => self.member(cursor, name, true),
            Step::Dot(name) => self.member(cursor, name, false),
            Step::Index(n) => self.element(cursor, n),
        }
    }

    fn see(&self, number: u32) -> Result<Seen, PathProblem> {
        self.btf.see(number).ok_or(PathProblem::Damaged)
    }

    /// The struct that a forward declaration stands for; others are complete.
    fn complete(&self, seen: Seen) -> Result<Seen, PathProblem> {
        if seen.kind != Kind::Forward {
            return Ok(seen);
        }
        let incomplete = || PathProblem::Incomplete { of: self.btf.describe(seen.number) };
        self.see(self.btf.complete(seen.number).ok_or_else(incomplete)?)
    }

    fn member(&self, cursor: Cursor, name: &str, arrow: bool) -> Result<Cursor, PathProblem> {
        let seen = self.see(cursor.number)?;
        let of = self.btf.describe(cursor.number);
        let (mut cursor, mut seen) = match seen.kind {
            Kind::Pointer(target) => {
                let target = self.see(target)?;
                match target.kind {
                    Kind::Compound { .. } | Kind::Forward => {}
                    Kind::Pointer(_) => return Err(PathProblem::PointerToPointer { of }),
                    _ => return Err(PathProblem::NoMembers { of }),
                }
                (self.follow(cursor, target)?, target)
            }
            Kind::Compound { .. } if arrow => return Err(PathProblem::NoPointer { of }),
            Kind::Compound { .. } => (cursor, seen),
            _ => return Err(PathProblem::NoMembers { of }),
        };
        seen = self.complete(seen)?;
        let Some(member) = self.btf.member_of(seen.number, name) else {
            let names = self.btf.member_names(seen.number);
            let names = Near::to(name, names.iter().copied());
            return Err(PathProblem::Member { within: self.btf.describe(seen.number), names });
        };
        cursor.bits = cursor.bits.checked_add(member.bits.into()).ok_or(PathProblem::Far)?;
        cursor.number = member.number;
        cursor.width = member.width;
        // Older type information has the width in the type.
        if let Kind::Int(int) = self.see(member.number)?.kind
            && member.width == 0
            && int.is_field()
        {
            cursor.width = int.bits;
            cursor.bits = cursor.bits.checked_add(int.skip.into()).ok_or(PathProblem::Far)?;
        }
        Ok(cursor)
    }

    fn element(&self, mut cursor: Cursor, n: u32) -> Result<Cursor, PathProblem> {
        let no_elements = |number: u32| PathProblem::NoElements { of: self.btf.describe(number) };
        let element = match self.see(cursor.number)?.kind {
            Kind::Array { element, count } => {
                if count > 0 && n >= count {
                    return Err(PathProblem::Bounds { count });
                }
                element
            }
            Kind::Pointer(target) => {
                let seen = self.see(target)?;
                let target = self.complete(seen)?.number;
                // Functions and `void` have no size.
                self.btf.size_of(target).ok_or_else(|| no_elements(cursor.number))?;
                cursor = self.follow(cursor, seen)?;
                target
            }
            _ => return Err(no_elements(cursor.number)),
        };
        let size = self.btf.size_of(element).ok_or(PathProblem::Damaged)?;
        let bits = size.checked_mul(8).and_then(|bits| bits.checked_mul(n.into()));
        cursor.bits =
            bits.and_then(|bits| cursor.bits.checked_add(bits)).ok_or(PathProblem::Far)?;
        cursor.number = element;
        Ok(cursor)
    }

    /// What a pointer leads to.
    fn follow(&self, cursor: Cursor, target: Seen) -> Result<Cursor, PathProblem> {
        if target.user {
            return Err(PathProblem::User);
        }
        let base = match cursor.base {
            Base::Words { .. } => {
                let (from, shift) = cursor.word(64)?;
                if shift != 0 {
                    return Err(PathProblem::Damaged);
                }
                Base::Memory { from, hops: Vec::new() }
            }
            Base::Memory { from, mut hops } => {
                if hops.len() == Fetch::MOST_HOPS {
                    return Err(PathProblem::Long);
                }
                hops.push(offset(cursor.bits)?);
                Base::Memory { from, hops }
            }
        };
        Ok(Cursor { base, bits: 0, width: 0, number: target.number })
    }

    /// How the value at the end is fetched and shown.
    fn end(&self, cursor: Cursor, max: Option<u8>) -> Result<(Fetch, Shape), PathProblem> {
        let seen = self.see(cursor.number)?;
        let of = || self.btf.describe(cursor.number);
        if cursor.width > 0 {
            return match max {
                None => self.field(&cursor, seen),
                Some(_) => Err(PathProblem::NotText { of: of() }),
            };
        }
        let is_text = |element| match self.letters(element) {
            Letters::Plain => true,
            Letters::Unsigned | Letters::Bytes => max.is_some(),
            Letters::None => false,
        };
        match seen.kind {
            Kind::Pointer(target) => {
                let target = self.see_text(target);
                if let Some((seen, letters)) = target
                    && !seen.user
                    && (max.is_some() || letters != Letters::Bytes)
                {
                    return self.follow(cursor, seen)?.text(max.unwrap_or(DEFAULT_TEXT));
                }
            }
            Kind::Array { element, count } if is_text(element) => {
                let max = max.unwrap_or(DEFAULT_TEXT);
                let room = u8::try_from(count).unwrap_or(max);
                return cursor.text(if count == 0 { max } else { max.min(room) });
            }
            _ => {}
        }
        if max.is_some() {
            return Err(PathProblem::NotText { of: of() });
        }
        let inner = self.inner(cursor.number).ok_or(PathProblem::Damaged)?;
        match self.scalar(inner) {
            Some(shape) => cursor.scalar(shape),
            None => self.whole(&cursor, seen),
        }
    }

    /// The text that a pointer to this type leads to.
    fn see_text(&self, target: u32) -> Option<(Seen, Letters)> {
        let letters = self.letters(target);
        self.btf.see(target).filter(|_| letters != Letters::None).map(|seen| (seen, letters))
    }

    fn field(&self, cursor: &Cursor, seen: Seen) -> Result<(Fetch, Shape), PathProblem> {
        let signed = matches!(
            seen.kind,
            Kind::Int(Int { signed: true, .. }) | Kind::Enum { signed: true, .. }
        );
        let width = u8::try_from(cursor.width).ok().filter(|width| *width <= 64);
        let width = width.ok_or(PathProblem::Damaged)?;
        let (from, hops) = match &cursor.base {
            Base::Words { .. } => {
                let (from, shift) = cursor.word(width)?;
                return Ok((from.word(), Shape::Bits { shift, width, signed }));
            }
            Base::Memory { from, hops } => (*from, hops.clone()),
        };
        // The smallest word that it is in: an aligned one does not reach out of the struct.
        let fits =
            |(step, size): &(u64, u64)| cursor.bits % (8 * step) + u64::from(width) <= 8 * size;
        let aligned = [1, 2, 4, 8].map(|size| (size, size)).into_iter().find(fits);
        let words = aligned.or_else(|| [1, 2, 4, 8].map(|size| (1, size)).into_iter().find(fits));
        let (step, size) =
            words.ok_or_else(|| PathProblem::NoValue { of: self.btf.describe(cursor.number) })?;
        let shift = cursor.bits % (8 * step);
        let last = Last::Word { offset: offset(cursor.bits - shift)?, size: small(size)? };
        let shape = Shape::Bits { shift: small(shift)?, width, signed };
        Ok((Fetch::Memory { from, hops, last }, shape))
    }

    /// A struct, an array or a large integer as it is.
    fn whole(&self, cursor: &Cursor, seen: Seen) -> Result<(Fetch, Shape), PathProblem> {
        let of = || self.btf.describe(cursor.number);
        let array = matches!(seen.kind, Kind::Array { .. });
        match seen.kind {
            Kind::Int(_) | Kind::Array { .. } | Kind::Compound { .. } => {}
            Kind::Forward => return Err(PathProblem::Incomplete { of: of() }),
            _ => return Err(PathProblem::NoValue { of: of() }),
        }
        let size = self.btf.size_of(cursor.number).ok_or(PathProblem::Damaged)?;
        let most = u64::from(Last::MOST_BYTES);
        if array && !(1..=most).contains(&size) {
            return Err(PathProblem::LargeArray);
        }
        if size > most {
            let names = self.btf.member_names(seen.number);
            let names = Near::first(names.iter().copied());
            return Err(PathProblem::Large { of: of(), size, names });
        }
        if size == 0 {
            return Err(PathProblem::NoValue { of: of() });
        }
        match &cursor.base {
            Base::Memory { from, hops } => {
                let size = small(size)?;
                let last = Last::Bytes { offset: offset(cursor.bits)?, size };
                let fetch = Fetch::Memory { from: *from, hops: hops.clone(), last };
                Ok((fetch, Shape::Raw { bytes: size }))
            }
            // Only the parameter itself: parts of words have no shape.
            &Base::Words { first, count, result } => {
                let place = Place::Words { first, count };
                let full = size.div_ceil(8) == u64::from(count) && cursor.bits == 0;
                let value = self.value(cursor.number, place, |word| source(word, result));
                value.filter(|_| full).ok_or(PathProblem::NoWord)
            }
        }
    }
}

/// How much of a text is fetched where nothing else is said.
const DEFAULT_TEXT: u8 = 64;

impl Cursor {
    fn text(self, max: u8) -> Result<(Fetch, Shape), PathProblem> {
        let Base::Memory { from, hops } = self.base else { return Err(PathProblem::NoWord) };
        let last = Last::Text { offset: offset(self.bits)?, max };
        Ok((Fetch::Memory { from, hops, last }, Shape::Text))
    }

    fn scalar(self, shape: Shape) -> Result<(Fetch, Shape), PathProblem> {
        let (size, signed) = match shape {
            Shape::Signed { bytes } => (bytes, true),
            Shape::Unsigned { bytes } => (bytes, false),
            Shape::Enum { bytes, signed, .. } => (bytes, signed),
            Shape::Bool | Shape::Char => (1, false),
            Shape::Pointer => (8, false),
            Shape::Text | Shape::Bits { .. } | Shape::Raw { .. } => {
                return Err(PathProblem::Damaged);
            }
        };
        match self.base {
            Base::Words { .. } => {
                let width = small(8 * u64::from(size))?;
                let (from, shift) = self.word(width)?;
                let part = Shape::Bits { shift, width, signed };
                Ok((from.word(), if shift == 0 { shape } else { part }))
            }
            Base::Memory { from, hops } => {
                let last = Last::Word { offset: offset(self.bits)?, size };
                Ok((Fetch::Memory { from, hops, last }, shape))
            }
        }
    }

    /// The word that has all of a value of this many bits, and where in it the value begins.
    fn word(&self, width: u8) -> Result<(Source, u8), PathProblem> {
        let Base::Words { first, count, result } = self.base else {
            return Err(PathProblem::NoWord);
        };
        let (word, shift) = (small(self.bits / 64)?, small(self.bits % 64)?);
        let inside = u16::from(shift) + u16::from(width) <= 64;
        if !inside || word >= count {
            return Err(PathProblem::NoWord);
        }
        if result && word > 0 {
            return Err(PathProblem::SecondRegister);
        }
        let word = first.checked_add(word).ok_or(PathProblem::NoWord)?;
        Ok((source(word, result), shift))
    }
}

impl Source {
    fn word(self) -> Fetch {
        match self {
            Self::Argument(word) => Fetch::Argument(word),
            Self::Result => Fetch::Result,
        }
    }
}

fn source(word: u8, result: bool) -> Source {
    if result { Source::Result } else { Source::Argument(word) }
}

/// Whole bytes of a number of bits.
fn offset(bits: u64) -> Result<i32, PathProblem> {
    i32::try_from(bits / 8).map_err(|_| PathProblem::Far)
}

fn small(value: u64) -> Result<u8, PathProblem> {
    u8::try_from(value).map_err(|_| PathProblem::NoWord)
}
