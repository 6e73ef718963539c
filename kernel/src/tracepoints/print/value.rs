//! What expressions are: fields and parts of them, names for their numbers and bits.

use super::number::Number;
use super::view::View;

/// What an expression is.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Number(Number),
    Text(String),
    /// A text of this field.
    Field(String),
    View(View),
    /// Whether it is equal to a number, or is not.
    Test(View, u64, bool),
    /// A number less another, of 64 bits, by the names of their fields.
    Less(String, String),
    Choice(Choice),
    Flags(Flags),
}

/// What is printed instead of a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    Text(String),
    Number(Number),
}

/// Names for the numbers of a field.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    pub(super) view: View,
    names: Vec<(u64, Said)>,
    /// For all others; without one they are hexadecimal.
    others: Option<Said>,
}

/// Names for the bits of a field.
#[derive(Clone, Debug)]
pub(super) struct Flags {
    pub(super) view: View,
    names: Vec<(u64, String)>,
    /// Nothing between them.
    close: bool,
    /// What stands for 0.
    zero: Option<String>,
}

/// Bits so few that all of their numbers are looked at.
const FEW: u64 = 8;

impl Value {
    /// As what is printed of a choice.
    pub(super) fn said(self) -> Option<Said> {
        match self {
            Self::Text(text) => Some(Said::Text(text)),
            Self::Number(number) => Some(Said::Number(number)),
            _ => None,
        }
    }
}

impl Choice {
    /// `__print_symbolic`
    pub(super) fn symbolic(value: Value, list: Vec<(u64, String)>) -> Option<Value> {
        let Value::View(view) = value else { return None };
        // The kernel prints the number where nothing stands for it.
        if list.iter().any(|(_, name)| name.is_empty()) {
            return None;
        }
        let names = list.into_iter().map(|(number, name)| (number, Said::Text(name)));
        let this = Self { view: view.passed()?, names: names.collect(), others: None };
        Some(Value::Choice(this))
    }

    /// `view == number ? same : others`
    pub(super) fn between(view: View, number: u64, same: Said, others: Value) -> Option<Value> {
        Some(match others {
            Value::Choice(mut other) if other.view.is_like(&view) => {
                other.names.retain(|(own, _)| *own != number);
                other.names.insert(0, (number, same));
                Value::Choice(other)
            }
            Value::Flags(mut other) if number == 0 && other.view.has_bits_of(&view) => {
                let Said::Text(same) = same else { return None };
                other.zero = Some(same);
                Value::Flags(other)
            }
            others => Value::Choice(Self {
                view,
                names: vec![(number, same)],
                others: Some(others.said()?),
            }),
        })
    }

    /// Its form, with `say` for each name.
    pub(super) fn form(&self, say: impl Fn(&Said) -> Option<String>) -> Option<String> {
        // Not all converters know that of arrays.
        if self.view.place.index.is_some() {
            return None;
        }
        let (before, shift) = self.view.before()?;
        let low = (1_u64 << shift) - 1;
        let others = self.others.as_ref().map(|others| Some(format!("*={}", part(say(others)?)?)));
        let mut list = Vec::new();
        for (number, said) in &self.names {
            // Others never come.
            if number & low == 0 {
                list.push(format!("{}={}", number >> shift, part(say(said)?)?));
            }
        }
        // What is printed for one without a name is not shifted.
        if shift > 0 && others.is_none() {
            let most = self.view.keep() >> self.view.shift() >> shift;
            let all = most < FEW
                && (0..=most)
                    .all(|number| self.names.iter().any(|(own, _)| *own == number << shift));
            all.then_some(())?;
        }
        if let Some(others) = others {
            list.push(others?);
        }
        Some(format!("{before}names {}", list.join(",")))
    }
}

impl Flags {
    /// `__print_flags`
    pub(super) fn new(value: Value, between: &str, list: Vec<(u64, String)>) -> Option<Self> {
        let Value::View(view) = value else { return None };
        let close = match between {
            "" => true,
            "|" => false,
            _ => return None,
        };
        // It would stand before everything.
        if list.iter().any(|(bits, _)| *bits == 0) {
            return None;
        }
        Some(Self { view: view.passed()?, names: list, close, zero: None })
    }

    /// Its form.
    pub(super) fn form(&self) -> Option<String> {
        let list = |shift: u32, left: bool| {
            let each = self.names.iter().map(|(bits, name)| {
                let bits = if left { bits << shift } else { bits >> shift };
                Some(format!("{bits}={}", part(name.clone())?))
            });
            let zero = self.zero.as_ref().map(|zero| Some(format!("0={}", part(zero.clone())?)));
            Some(each.chain(zero).collect::<Option<Vec<_>>>()?.join(","))
        };
        let (all, some) =
            if self.close { ("allletters", "letters") } else { ("allflags", "flags") };
        match self.view.before() {
            Some((before, 0)) => Some(format!("{before}{all} {}", list(0, false)?)),
            found => {
                // Where each bit has its own name, no number is left, and others do not come.
                let own = self.view.keep() >> self.view.shift();
                let named = self.names.iter().fold(0, |all, (bits, _)| all | bits);
                let single = self.names.iter().all(|(bits, _)| bits.is_power_of_two());
                let count = u32::try_from(self.names.len()).ok()?;
                if !single || named != own || count != own.count_ones() {
                    return None;
                }
                match found {
                    Some((before, shift)) if self.zero.is_some() => {
                        Some(format!("{before}{all} {}", list(shift, false)?))
                    }
                    _ if self.zero.is_some() => None,
                    _ => Some(format!("{some} {}", list(self.view.shift(), true)?)),
                }
            }
        }
    }
}

/// A name, if it can be one in a list.
fn part(name: String) -> Option<String> {
    let is_part = |c: char| matches!(c, ' '..='~') && !",={}".contains(c);
    name.chars().all(is_part).then_some(name)
}
