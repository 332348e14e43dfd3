//! Parser of expressions, with Jinja2's precedences.

use std::sync::Arc;

use super::ast::{Arguments, Comparison, Expr, ExprKind, Operator};
use super::error::Error;
use super::lexer::Token;
use super::parser::Parser;

impl Parser {
    pub(super) fn expression(&mut self) -> Result<Expr, Error> {
        self.nested(Self::conditional)
    }

    fn conditional(&mut self) -> Result<Expr, Error> {
        let line = self.line();
        let mut expr = self.or()?;
        while self.skip_name("if") {
            let test = Box::new(self.or()?);
            let otherwise =
                if self.skip_name("else") { Some(Box::new(self.nested(Self::conditional)?)) } else { None };
            expr = Expr { line, kind: ExprKind::Condition { test, then: Box::new(expr), otherwise } };
        }
        Ok(expr)
    }

    fn or(&mut self) -> Result<Expr, Error> {
        let line = self.line();
        let mut left = self.and()?;
        while self.skip_name("or") {
            let right = self.and()?;
            left = Expr { line, kind: ExprKind::Or(Box::new(left), Box::new(right)) };
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<Expr, Error> {
        let line = self.line();
        let mut left = self.not()?;
        while self.skip_name("and") {
            let right = self.not()?;
            left = Expr { line, kind: ExprKind::And(Box::new(left), Box::new(right)) };
        }
        Ok(left)
    }

    fn not(&mut self) -> Result<Expr, Error> {
        let line = self.line();
        if self.at_name("not") {
            self.next();
            let inner = self.nested(Self::not)?;
            return Ok(Expr { line, kind: ExprKind::Not(Box::new(inner)) });
        }
        self.compare()
    }

    fn compare(&mut self) -> Result<Expr, Error> {
        let line = self.line();
        let first = self.sum()?;
        let mut comparisons = Vec::new();
        loop {
            let comparison = match self.current() {
                Some(Token::Operator("==")) => Comparison::Eq,
                Some(Token::Operator("!=")) => Comparison::Ne,
                Some(Token::Operator("<")) => Comparison::Lt,
                Some(Token::Operator("<=")) => Comparison::Le,
                Some(Token::Operator(">")) => Comparison::Gt,
                Some(Token::Operator(">=")) => Comparison::Ge,
                Some(Token::Name(name)) if &**name == "in" => Comparison::In,
                Some(Token::Name(name)) if &**name == "not" && self.next_is_name("in") => {
                    self.next();
                    Comparison::NotIn
                }
                _ => break,
            };
            self.next();
            comparisons.push((comparison, self.sum()?));
        }
        if comparisons.is_empty() {
            return Ok(first);
        }
        Ok(Expr { line, kind: ExprKind::Compare(Box::new(first), comparisons) })
    }

    /// Parses left-associative operators of one precedence.
    fn operators(
        &mut self,
        operators: &[(&str, Operator)],
        operand: fn(&mut Self) -> Result<Expr, Error>,
    ) -> Result<Expr, Error> {
        let line = self.line();
        let mut left = operand(self)?;
        while let Some((sign, operator)) = operators.iter().find(|(sign, _)| self.at(sign)) {
            self.expect(sign)?;
            let right = operand(self)?;
            left = Expr { line, kind: ExprKind::Binary(*operator, Box::new(left), Box::new(right)) };
        }
        Ok(left)
    }

    fn sum(&mut self) -> Result<Expr, Error> {
        self.operators(&[("+", Operator::Add), ("-", Operator::Sub)], Self::concat)
    }

    fn concat(&mut self) -> Result<Expr, Error> {
        let line = self.line();
        let first = self.product()?;
        if !self.at("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.skip("~") {
            parts.push(self.product()?);
        }
        Ok(Expr { line, kind: ExprKind::Concat(parts) })
    }

    fn product(&mut self) -> Result<Expr, Error> {
        let operators =
            [("*", Operator::Mul), ("/", Operator::Div), ("//", Operator::FloorDiv), ("%", Operator::Mod)];
        self.operators(&operators, Self::power)
    }

    fn power(&mut self) -> Result<Expr, Error> {
        self.operators(&[("**", Operator::Pow)], |parser| parser.unary(true))
    }

    fn unary(&mut self, with_filter: bool) -> Result<Expr, Error> {
        let line = self.line();
        let mut expr = if self.skip("-") {
            let inner = self.nested(|parser| parser.unary(false))?;
            Expr { line, kind: ExprKind::Negative(Box::new(inner)) }
        } else if self.skip("+") {
            let inner = self.nested(|parser| parser.unary(false))?;
            Expr { line, kind: ExprKind::Positive(Box::new(inner)) }
        } else {
            self.primary()?
        };
        expr = self.postfix(expr)?;
        if with_filter { self.filter_expression(expr) } else { Ok(expr) }
    }

    fn primary(&mut self) -> Result<Expr, Error> {
        let line = self.line();
        let kind = match self.current().cloned() {
            Some(Token::Name(name)) => {
                self.next();
                match &*name {
                    "true" | "True" => ExprKind::Bool(true),
                    "false" | "False" => ExprKind::Bool(false),
                    "none" | "None" => ExprKind::None,
                    _ => {
                        self.record_read(&name);
                        ExprKind::Name(name)
                    }
                }
            }
            Some(Token::Text(text)) => {
                self.next();
                let mut text = text;
                while let Some(Token::Text(more)) = self.current() {
                    text = Arc::from(format!("{text}{more}"));
                    self.next();
                }
                ExprKind::Text(text)
            }
            Some(Token::Int(number)) => {
                self.next();
                ExprKind::Int(number)
            }
            Some(Token::Float(number)) => {
                self.next();
                ExprKind::Float(number)
            }
            Some(Token::Operator("(")) => {
                self.next();
                let inner = self.nested(|parser| parser.tuple(true, &[], true))?;
                self.expect(")")?;
                return Ok(inner);
            }
            Some(Token::Operator("[")) => {
                self.next();
                ExprKind::List(self.nested(|parser| parser.items("]", Self::expression))?)
            }
            Some(Token::Operator("{")) => {
                self.next();
                let entry = |parser: &mut Self| {
                    let key = parser.expression()?;
                    parser.expect(":")?;
                    Ok((key, parser.expression()?))
                };
                ExprKind::Map(self.nested(|parser| parser.items("}", entry))?)
            }
            _ => return self.fail("unexpected token in an expression"),
        };
        Ok(Expr { line, kind })
    }

    /// Parses items separated by commas up to `end`.
    fn items<T>(&mut self, end: &str, item: impl Fn(&mut Self) -> Result<T, Error>) -> Result<Vec<T>, Error> {
        let mut items = Vec::new();
        while !self.at(end) {
            if !items.is_empty() {
                self.expect(",")?;
                if self.at(end) {
                    break;
                }
            }
            items.push(item(self)?);
        }
        self.expect(end)?;
        Ok(items)
    }

    /// Parses an expression, or a tuple of expressions separated by commas. Names in `ends` end it; only in
    /// `parentheses` it may be empty.
    pub(super) fn tuple(
        &mut self,
        conditional: bool,
        ends: &[&str],
        parentheses: bool,
    ) -> Result<Expr, Error> {
        let line = self.line();
        let mut items = Vec::new();
        let mut tuple = false;
        loop {
            let ended = matches!(
                self.current(),
                None | Some(Token::VariableEnd | Token::BlockEnd | Token::Operator(")"))
            ) || ends.iter().any(|end| self.at_name(end));
            if ended {
                break;
            }
            items.push(if conditional { self.expression()? } else { self.nested(Self::or)? });
            if !self.skip(",") {
                break;
            }
            tuple = true;
        }
        match items.pop() {
            Some(only) if !tuple => Ok(only),
            None if !parentheses => self.fail("expected an expression"),
            last => {
                items.extend(last);
                Ok(Expr { line, kind: ExprKind::Tuple(items) })
            }
        }
    }

    fn postfix(&mut self, mut expr: Expr) -> Result<Expr, Error> {
        loop {
            let line = self.line();
            let kind = if self.skip(".") {
                match self.next() {
                    Some(Token::Name(name)) => ExprKind::Attribute(Box::new(expr), name),
                    Some(Token::Int(number)) => {
                        let number = Expr { line, kind: ExprKind::Int(number) };
                        ExprKind::Item(Box::new(expr), Box::new(number))
                    }
                    _ => return self.fail("expected name or number"),
                }
            } else if self.skip("[") {
                self.nested(|parser| parser.subscript(expr))?
            } else if self.at("(") {
                ExprKind::Call(Box::new(expr), self.nested(Self::arguments)?)
            } else {
                return Ok(expr);
            };
            expr = Expr { line, kind };
        }
    }

    fn subscript(&mut self, expr: Expr) -> Result<ExprKind, Error> {
        let line = self.line();
        let mut parts: [Option<Box<Expr>>; 3] = [None, None, None];
        let mut slice = false;
        for (number, part) in parts.iter_mut().enumerate() {
            if !self.at(":") && !self.at("]") && !self.at(",") {
                *part = Some(Box::new(self.expression()?));
            }
            if number == 2 || !self.skip(":") {
                break;
            }
            slice = true;
        }
        if slice {
            self.expect("]")?;
            return Ok(ExprKind::Slice(Box::new(expr), parts));
        }
        let [Some(index), ..] = parts else {
            return self.fail("expected subscript expression");
        };
        if self.at("]") {
            self.next();
            return Ok(ExprKind::Item(Box::new(expr), index));
        }
        self.expect(",")?;
        let mut items = vec![*index];
        items.extend(self.items("]", Self::expression)?);
        Ok(ExprKind::Item(Box::new(expr), Box::new(Expr { line, kind: ExprKind::Tuple(items) })))
    }

    fn filter_expression(&mut self, mut expr: Expr) -> Result<Expr, Error> {
        loop {
            let line = self.line();
            expr = if self.at("|") {
                self.filters(Some(expr), false)?
            } else if self.skip_name("is") {
                self.test(expr)?
            } else if self.at("(") {
                Expr { line, kind: ExprKind::Call(Box::new(expr), self.nested(Self::arguments)?) }
            } else {
                return Ok(expr);
            };
        }
    }

    /// Parses a chain of filters; the first has no `|` before it if `begun`.
    pub(super) fn filters(&mut self, mut expr: Option<Expr>, begun: bool) -> Result<Expr, Error> {
        let mut begun = begun;
        loop {
            let line = self.line();
            if !begun && !self.skip("|") {
                break;
            }
            begun = false;
            let name = self.dotted_name()?;
            let arguments = if self.at("(") { self.nested(Self::arguments)? } else { Arguments::default() };
            expr = Some(Expr { line, kind: ExprKind::Filter(expr.map(Box::new), name, arguments) });
        }
        match expr {
            Some(expr) => Ok(expr),
            None => self.fail("expected a filter"),
        }
    }

    fn dotted_name(&mut self) -> Result<Arc<str>, Error> {
        let mut name = self.name()?;
        while self.skip(".") {
            name = Arc::from(format!("{name}.{}", self.name()?));
        }
        Ok(name)
    }

    fn test(&mut self, expr: Expr) -> Result<Expr, Error> {
        let line = self.line();
        let negated = self.skip_name("not");
        let name = self.dotted_name()?;
        let mut arguments = Arguments::default();
        let operand = match self.current() {
            Some(Token::Name(name)) => !["else", "or", "and"].contains(&&**name),
            Some(Token::Text(_) | Token::Int(_) | Token::Float(_) | Token::Operator("[" | "{")) => true,
            _ => false,
        };
        if self.at("(") {
            arguments = self.nested(Self::arguments)?;
        } else if operand {
            if self.at_name("is") {
                return self.fail("You cannot chain multiple tests with is");
            }
            let argument = self.primary()?;
            arguments.positional.push(self.postfix(argument)?);
        }
        let test = Expr { line, kind: ExprKind::Test(Box::new(expr), name, arguments) };
        if negated { Ok(Expr { line, kind: ExprKind::Not(Box::new(test)) }) } else { Ok(test) }
    }

    fn arguments(&mut self) -> Result<Arguments, Error> {
        self.expect("(")?;
        let mut arguments = Arguments::default();
        let mut first = true;
        while !self.at(")") {
            if !first {
                self.expect(",")?;
                if self.at(")") {
                    break;
                }
            }
            first = false;
            if self.skip("*") {
                if arguments.star.is_some() || arguments.double_star.is_some() {
                    return self.fail("invalid syntax for function call expression");
                }
                arguments.star = Some(Box::new(self.expression()?));
            } else if self.skip("**") {
                if arguments.double_star.is_some() {
                    return self.fail("invalid syntax for function call expression");
                }
                arguments.double_star = Some(Box::new(self.expression()?));
            } else if matches!(self.current(), Some(Token::Name(_))) && self.next_is("=") {
                let name = self.name()?;
                self.expect("=")?;
                if arguments.double_star.is_some() || arguments.named.iter().any(|(other, _)| *other == name)
                {
                    return self.fail("invalid syntax for function call expression");
                }
                arguments.named.push((name, self.expression()?));
            } else {
                if arguments.star.is_some() || arguments.double_star.is_some() || !arguments.named.is_empty()
                {
                    return self.fail("invalid syntax for function call expression");
                }
                arguments.positional.push(self.expression()?);
            }
        }
        self.expect(")")?;
        Ok(arguments)
    }
}
