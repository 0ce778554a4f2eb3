"""A report as rows of FOCUS, the FinOps Open Cost and Usage Specification: for each job or pool and day one charge of
dataset *Cost and Usage*.

Columns are those of version 1.4 that are mandatory, and the conditional ones that apply; ours begin with ``x_``, as the
specification asks. Costs are internal: the site's energy at the price that the user gave, so billed, effective,
contracted and list cost are one.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from perseus_core.units import kwh_from_j
from perseus_operator.errors import UnusableArgument
from perseus_operator.report.figures import site_kwh
from perseus_operator.report.rows_csv import plain
from perseus_operator.report.statement import LOCATION, MARKET, PRICE, Member, Statement, instant

VERSION: Final = "1.4"
_SERVICE: Final = "GPU energy"
_G_PER_KG: Final = 1000.0


def write(statement: Statement, _by: str, digest: str) -> str:
    """Format a statement; arguments as of ``table.write``, but a row is always a job or pool on a day (UTC).

    Raises:
        UnusableArgument: without a price and an organization there are no charges.
    """
    if PRICE not in statement.factors or not statement.organization:
        raise UnusableArgument(
            "--format focus: needs --price and --currency, and --organization, in whose name energy is charged"
        )
    charges = [charge for member in statement.members for charge in _charges(statement, member, digest)]
    if not charges:
        raise UnusableArgument("--format focus: no energy of jobs or pools was measured, so nothing is charged")
    text = io.StringIO()
    lines = csv.DictWriter(text, list(charges[0]), lineterminator="\n")
    lines.writeheader()
    lines.writerows(charges)
    return text.getvalue().rstrip("\n")


def _charges(statement: Statement, member: Member, digest: str) -> Iterator[dict[str, str]]:
    slots = statement.period.slots
    days: dict[int, list[tuple[int, float]]] = {}
    for slot, kwh in site_kwh(statement, [member]):
        days.setdefault(slots[slot][0] // 86_400, []).append((slot, kwh))
    for day, energy in sorted(days.items()):
        yield _charge(statement, member, day, energy, digest)


def _charge(
    statement: Statement, member: Member, day: int, energy: list[tuple[int, float]], digest: str
) -> dict[str, str]:
    factors, organization = statement.factors, plain(statement.organization)
    quantity_kwh = math.fsum(kwh for _, kwh in energy)
    cost = math.fsum(kwh * factors[PRICE].at(slot) for slot, kwh in energy)
    constant = factors[PRICE].value
    unit_price = constant if constant is not None else cost / quantity_kwh if quantity_kwh else 0.0
    begin_s, end_s = max(day * 86_400, statement.period.begin_s), min((day + 1) * 86_400, statement.period.end_s)
    month = datetime.fromtimestamp(begin_s, UTC).replace(day=1, hour=0, minute=0, second=0)
    following = (month + timedelta(days=32)).replace(day=1)
    money = _decimal(cost)
    measured_kwh = kwh_from_j(math.fsum(member.at("energyJoules", slot) or 0.0 for slot, _ in energy))
    carbon = {
        f"x_{name}": _decimal(math.fsum(kwh * factors[factor].at(slot) for slot, kwh in energy) / _G_PER_KG)
        if factor in factors
        else ""
        for name, factor in (("LocationBasedCO2eKilograms", LOCATION), ("MarketBasedCO2eKilograms", MARKET))
    }
    return {
        "BilledCost": money,
        "BillingAccountId": organization,
        "BillingAccountName": organization,
        "BillingCurrency": statement.currency,
        "BillingPeriodEnd": instant(int(following.timestamp())),
        "BillingPeriodStart": instant(int(month.timestamp())),
        "ChargeCategory": "Usage",
        "ChargeClass": "",
        "ChargeDescription": f"Energy of {member.kind} {member.path}: GPUs as measured, by factors for the site",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodEnd": instant(end_s),
        "ChargePeriodStart": instant(begin_s),
        "ConsumedQuantity": _decimal(quantity_kwh),
        "ConsumedUnit": "kWh",
        "ContractedCost": money,
        "ContractedUnitPrice": _decimal(unit_price) if unit_price >= 0 else "",
        "EffectiveCost": money,
        "HostProviderName": organization,
        "InvoiceIssuerName": organization,
        "ListCost": money,
        "ListUnitPrice": _decimal(unit_price) if unit_price >= 0 else "",
        "PricingQuantity": _decimal(quantity_kwh),
        "PricingUnit": "kWh",
        "ResourceId": f"{member.kind}/{member.path}",
        "ResourceName": member.name,
        "ResourceType": {"job": "PerseusJob", "pool": "ServingPool"}[member.kind],
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": _SERVICE,
        "ServiceProviderName": organization,
        "SubAccountId": member.namespace,
        "SubAccountName": member.namespace,
        "x_EnergyClass": plain(member.energy_class),
        "x_Model": plain(member.model),
        "x_MeasuredGpuKilowattHours": _decimal(measured_kwh),
        **carbon,
        "x_PriceSource": plain(factors[PRICE].source),
        "x_StatementDigest": digest,
    }


def _decimal(value: float) -> str:
    return repr(float(value))
