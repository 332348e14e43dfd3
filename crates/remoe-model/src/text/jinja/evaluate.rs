//! Evaluation of expressions.

use std::sync::Arc;

use super::ast::{Arguments, Expr, ExprKind};
use super::calls::CallArguments;
use super::error::{Error, fail};
use super::filters;
use super::objects::Object;
use super::operators::expect_defined;
use super::predicates;
use super::python_text;
use super::renderer::Renderer;
use super::value::{Map, Value};

impl Renderer<'_> {
    /// Evaluates an expression; a text loses its mark as markup.
    pub(super) fn evaluate(&mut self, expr: &Expr) -> Result<Value, Error> {
        self.evaluate_with_markup(expr).map(Value::without_markup)
    }

    /// Evaluates an expression; a text that `safe` or `escape` marked stays markup.
    pub(super) fn evaluate_with_markup(&mut self, expr: &Expr) -> Result<Value, Error> {
        self.limits.charge_step()?;
        let value = self.evaluate_kind(expr).map_err(|error| error.in_line(expr.line))?;
        self.limits.check_depth(value.depth()).map_err(|error| error.in_line(expr.line))?;
        Ok(value)
    }

    fn evaluate_kind(&mut self, expr: &Expr) -> Result<Value, Error> {
        Ok(match &expr.kind {
            ExprKind::None => Value::None,
            ExprKind::Bool(flag) => Value::Bool(*flag),
            ExprKind::Int(number) => Value::Int(*number),
            ExprKind::Float(number) => Value::Float(*number),
            ExprKind::Text(text) => Value::Text(text.clone()),
            ExprKind::Name(name) => self.lookup(name),
            ExprKind::Tuple(items) => Value::tuple(self.evaluate_all(items)?),
            ExprKind::List(items) => Value::list(self.evaluate_all(items)?),
            ExprKind::Map(entries) => {
                let mut map = Map::default();
                for (key, value) in entries {
                    let key = self.evaluate(key)?;
                    let value = self.evaluate(value)?;
                    map.insert(&mut self.limits, key, value)?;
                }
                self.limits.charge_list(entries.len())?;
                Value::map(map)
            }
            ExprKind::Condition { test, then, otherwise } => {
                if self.evaluate(test)?.is_truthy() {
                    return self.evaluate_with_markup(then);
                }
                match otherwise {
                    Some(otherwise) => self.evaluate_with_markup(otherwise)?,
                    None => Value::undefined(
                        "the inline if-expression evaluated to false and no else section was defined.",
                    ),
                }
            }
            ExprKind::And(left, right) => {
                let left = self.evaluate_with_markup(left)?;
                if left.is_truthy() { self.evaluate_with_markup(right)? } else { left }
            }
            ExprKind::Or(left, right) => {
                let left = self.evaluate_with_markup(left)?;
                if left.is_truthy() { left } else { self.evaluate_with_markup(right)? }
            }
            ExprKind::Not(inner) => Value::Bool(!self.evaluate(inner)?.is_truthy()),
            ExprKind::Compare(first, comparisons) => {
                let mut left = self.evaluate(first)?;
                for (comparison, right) in comparisons {
                    let right = self.evaluate(right)?;
                    if !self.compare(*comparison, &left, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Value::Bool(true)
            }
            ExprKind::Binary(operator, left, right) => {
                let (left, right) = (self.evaluate_with_markup(left)?, self.evaluate_with_markup(right)?);
                self.binary(*operator, &left, &right)?
            }
            ExprKind::Concat(parts) => {
                let mut whole = String::new();
                for part in parts {
                    let part = self.evaluate(part)?;
                    match part.as_text() {
                        Some(text) => {
                            self.limits.charge_text(whole.len() + text.len())?;
                            whole.push_str(text);
                        }
                        None => {
                            let text = python_text::to_str(&mut self.limits, &part)?;
                            self.limits.charge_text(whole.len() + text.len())?;
                            whole.push_str(&text);
                        }
                    }
                }
                Value::Text(whole.into())
            }
            ExprKind::Negative(inner) => {
                let inner = self.evaluate(inner)?;
                self.negative(&inner)?
            }
            ExprKind::Positive(inner) => {
                let inner = self.evaluate(inner)?;
                expect_defined(&inner)?;
                match (inner.as_int(), &inner) {
                    (Some(number), _) => Value::Int(number),
                    (None, Value::Float(_)) => inner,
                    _ => return fail(format!("bad operand type for unary +: '{}'", inner.type_name())),
                }
            }
            ExprKind::Attribute(owner, name) => {
                let owner = self.evaluate(owner)?;
                self.attribute(&owner, name)?
            }
            ExprKind::Item(owner, key) => {
                let (owner, key) = (self.evaluate(owner)?, self.evaluate(key)?);
                self.item(&owner, &key)?
            }
            ExprKind::Slice(owner, parts) => {
                let owner = self.evaluate(owner)?;
                let mut evaluated = [None, None, None];
                for (value, part) in evaluated.iter_mut().zip(parts) {
                    if let Some(part) = part {
                        *value = Some(self.evaluate(part)?);
                    }
                }
                self.slice(&owner, evaluated)?
            }
            ExprKind::Call(..) => self.evaluate_call(expr, None)?,
            ExprKind::Filter(Some(value), name, arguments) => {
                let value = self.evaluate(value)?;
                let args = self.evaluate_arguments(arguments)?;
                filters::apply(self, name, value, args)?
            }
            ExprKind::Filter(None, ..) => return fail("a filter without a value"),
            ExprKind::Test(value, name, arguments) => {
                let value = self.evaluate(value)?;
                let args = self.evaluate_arguments(arguments)?;
                Value::Bool(predicates::apply(self, name, &value, args)?)
            }
        })
    }

    fn evaluate_all(&mut self, items: &[Expr]) -> Result<Vec<Value>, Error> {
        self.limits.charge_list(items.len())?;
        items.iter().map(|item| self.evaluate(item)).collect()
    }

    /// Applies the filters of `{% filter %}` or `{% set %}` to `value`.
    pub(super) fn evaluate_filters(&mut self, expr: &Expr, value: Value) -> Result<Value, Error> {
        let ExprKind::Filter(inner, name, arguments) = &expr.kind else {
            return fail("expected a filter");
        };
        let value = match inner {
            Some(inner) => self.evaluate_filters(inner, value)?,
            None => value,
        };
        let args = self.evaluate_arguments(arguments)?;
        let value = filters::apply(self, name, value, args).map_err(|error| error.in_line(expr.line))?;
        self.limits.check_depth(value.depth()).map_err(|error| error.in_line(expr.line))?;
        Ok(value)
    }

    fn evaluate_arguments(&mut self, arguments: &Arguments) -> Result<CallArguments, Error> {
        let mut args = CallArguments::default();
        for argument in &arguments.positional {
            args.positional.push(self.evaluate(argument)?);
        }
        if let Some(star) = &arguments.star {
            let star = self.evaluate(star)?;
            let items = self.iterate(&star)?;
            self.limits.charge_arguments(args.positional.len() + items.len())?;
            args.positional.extend(items.iter().cloned());
        }
        for (name, argument) in &arguments.named {
            args.named.push((name.clone(), self.evaluate(argument)?));
        }
        if let Some(double_star) = &arguments.double_star {
            let explicit = args.named.len();
            match self.evaluate(double_star)? {
                Value::Map(map) => {
                    self.limits.charge_arguments(args.named.len() + map.len())?;
                    for (key, value) in map.entries() {
                        let Value::Text(name) = key else {
                            return fail("keywords must be strings");
                        };
                        if args.named.iter().take(explicit).any(|(other, _)| other == name) {
                            return fail(format!("got multiple values for keyword argument '{name}'"));
                        }
                        args.named.push((name.clone(), value.clone()));
                    }
                }
                other => {
                    return fail(format!("argument after ** must be a mapping, not {}", other.type_name()));
                }
            }
        }
        Ok(args)
    }

    /// Evaluates a call; `caller` is the body of a call block.
    pub(super) fn evaluate_call(&mut self, expr: &Expr, caller: Option<Value>) -> Result<Value, Error> {
        let ExprKind::Call(callee, arguments) = &expr.kind else {
            return fail("expected a call");
        };
        let callee = self.evaluate(callee)?;
        let mut args = self.evaluate_arguments(arguments)?;
        if let Some(caller) = caller {
            args.named.push((Arc::from("caller"), caller));
        }
        self.call(&callee, args).map_err(|error| error.in_line(expr.line))
    }

    pub(super) fn call(&mut self, callee: &Value, args: CallArguments) -> Result<Value, Error> {
        expect_defined(callee)?;
        let Value::Object(object) = callee else {
            return fail(format!("'{}' object is not callable", callee.type_name()));
        };
        match &**object {
            Object::Macro(number, scope, _) => self.call_macro(*number, *scope, args),
            Object::Function(name) => self.call_function(name, args),
            Object::Method(owner, name) => self.call_method(owner, name, args),
            Object::Joiner(separator, used) => {
                args.expect_none("joiner")?;
                Ok(if used.replace(true) { separator.clone() } else { Value::text("") })
            }
            Object::Loop(state) => {
                let [items] = args.bind("loop", ["iterable"], 1)?;
                self.call_loop(state, &items.unwrap_or(Value::None))
            }
            other => fail(format!("'{}' object is not callable", other.type_name())),
        }
    }
}
