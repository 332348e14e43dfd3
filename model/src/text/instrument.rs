//! A template's instructions, rewritten so that nothing it builds goes uncounted.
//!
//! The engine counts instructions, but one of them can double a text. So operators become calls of
//! [`guard`](crate::text::guard), text between tags is written like any value, and what is put into a
//! namespace is looked at first: a namespace that contained itself would have no end.

use std::collections::HashSet;

use minijinja::Value;
use minijinja::machinery::{Instruction, Instructions, Span};

use crate::text::guard;

/// The same instructions under guard; none where a namespace's attribute is set in a way that no parser
/// writes.
pub(super) fn guarded<'a>(old: &Instructions<'a>) -> Option<Instructions<'a>> {
    let all: Vec<&Instruction<'a>> = (0..).map_while(|index| old.get(index)).collect();
    let kept = kept_values(&all)?;
    // Where each old instruction goes; jumps to a value that is kept lead to the look at it.
    let mut targets = Vec::with_capacity(all.len() + 1);
    let mut next = 0_u32;
    for (index, instruction) in all.iter().enumerate() {
        targets.push(next);
        next +=
            1 + u32::from(kept.contains(&index)) + u32::from(matches!(instruction, Instruction::EmitRaw(_)));
    }
    targets.push(next);
    let mut new = Instructions::new(old.name(), old.source());
    let calls = |name: &'static str| Instruction::CallFunction(name, Some(2));
    for (index, instruction) in all.iter().enumerate() {
        let span = u32::try_from(index).ok().and_then(|index| old.get_span(index));
        let line = u32::try_from(index).ok().and_then(|index| old.get_line(index)).unwrap_or(0);
        let mut add = |instruction: Instruction<'a>| match span {
            Some(span) if span != Span::default() => new.add_with_span(instruction, span),
            _ => new.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX)),
        };
        if kept.contains(&index) {
            add(Instruction::CallFunction(guard::KEEP, Some(1)));
        }
        let to = |target: &u32| targets.get(*target as usize).copied();
        let guarded = match instruction {
            Instruction::EmitRaw(text) => {
                add(Instruction::LoadConst(Value::from_safe_string((*text).to_owned())));
                Instruction::Emit
            }
            Instruction::Add => calls(guard::ADD),
            Instruction::Mul => calls(guard::MUL),
            Instruction::StringConcat => calls(guard::CONCAT),
            Instruction::Eq => calls(guard::EQ),
            Instruction::Ne => calls(guard::NE),
            Instruction::Lt => calls(guard::LT),
            Instruction::Lte => calls(guard::LTE),
            Instruction::Gt => calls(guard::GT),
            Instruction::Gte => calls(guard::GTE),
            Instruction::In => calls(guard::IN),
            Instruction::Iterate(target) => Instruction::Iterate(to(target)?),
            Instruction::Jump(target) => Instruction::Jump(to(target)?),
            Instruction::JumpIfFalse(target) => Instruction::JumpIfFalse(to(target)?),
            Instruction::JumpIfFalseOrPop(target) => Instruction::JumpIfFalseOrPop(to(target)?),
            Instruction::JumpIfTrueOrPop(target) => Instruction::JumpIfTrueOrPop(to(target)?),
            Instruction::BuildMacro(name, target, flags) => {
                Instruction::BuildMacro(name, to(target)?, *flags)
            }
            other => (*other).clone(),
        };
        add(guarded);
    }
    Some(new)
}

/// Before which instructions a value lies on the stack that goes into a namespace: in front of the
/// namespace's lookup.
fn kept_values(all: &[&Instruction<'_>]) -> Option<HashSet<usize>> {
    let mut kept = HashSet::new();
    for (index, instruction) in all.iter().enumerate() {
        if matches!(instruction, Instruction::SetAttr(_)) {
            let path = all.get(..index)?.iter().rev();
            let attributes = path.take_while(|before| matches!(before, Instruction::GetAttr(_))).count();
            let lookup = index.checked_sub(attributes + 1)?;
            matches!(all.get(lookup), Some(Instruction::Lookup(_))).then_some(())?;
            kept.insert(lookup);
        }
    }
    Some(kept)
}
