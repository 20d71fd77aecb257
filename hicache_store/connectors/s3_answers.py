"""What boto3 and aiobotocore are asked and what their answers mean, the same for both.

Answers are the dictionaries of botocore; this module needs neither SDK.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, Final

from hicache_store.connectors.s3_plane import (
    BucketFacts,
    Condition,
    FaultKind,
    Found,
    Listed,
    Page,
    PlaneFault,
    fault_of_answer,
    require_version,
)

_EXPIRY_RULE: Final = "hicache-store expiry of "


def range_arguments(span: tuple[int, int] | None) -> dict[str, str]:
    """The arguments of a GET of a part."""
    return {} if span is None else {"Range": f"bytes={span[0]}-{span[1] - 1}"}


def condition_arguments(condition: Condition) -> dict[str, str]:
    """The arguments of a conditional PUT."""
    if condition.creates:
        return {"IfNoneMatch": "*"}
    return {} if condition.version is None else {"IfMatch": condition.version}


def found_of_head(answer: Mapping[str, Any]) -> Found:
    """What the answer to a HEAD tells."""
    size_bytes = answer.get("ContentLength")
    if size_bytes is None:
        raise PlaneFault(FaultKind.PROTOCOL, "the answer has no length")
    return Found(int(size_bytes), require_version(answer.get("ETag")))


def found_of_get(answer: Mapping[str, Any], span: tuple[int, int] | None) -> tuple[Found, int]:
    """The whole object and the length of the body, from the headers of a GET."""
    declared = answer.get("ContentLength")
    if declared is None:
        raise PlaneFault(FaultKind.PROTOCOL, "the body has no length")
    version = require_version(answer.get("ETag"))
    if span is None:
        return Found(int(declared), version), int(declared)
    first, _, rest = str(answer.get("ContentRange") or "").removeprefix("bytes ").partition("-")
    last, _, total = rest.partition("/")
    if not (first.isdigit() and last.isdigit() and total.isdigit()) or int(first) != span[0]:
        raise PlaneFault(FaultKind.PROTOCOL, "the answer is not the range that was asked for")
    return Found(int(total), version), int(declared)


def page_of(answer: Mapping[str, Any]) -> Page:
    """One page of a list."""
    rows = [
        Listed(row["Key"], int(row["Size"]), row["LastModified"].timestamp(), row.get("ETag"))
        for row in answer.get("Contents", ())
    ]
    return Page(rows, answer.get("NextContinuationToken") if answer.get("IsTruncated") else None)


def facts_of(answer: Mapping[str, Any]) -> BucketFacts:
    """What the answer to a HEAD of the bucket tells."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    at_s = None
    with contextlib.suppress(TypeError, ValueError):
        at_s = parsedate_to_datetime(headers.get("date")).timestamp()
    return BucketFacts(answer.get("BucketRegion") or headers.get("x-amz-bucket-region"), at_s)


def delete_arguments(keys: Sequence[str]) -> dict[str, Any]:
    """The body of DeleteObjects."""
    return {"Objects": [{"Key": key} for key in keys], "Quiet": True}


def faults_of_delete(answer: Mapping[str, Any], keys: Sequence[str]) -> list[PlaneFault | None]:
    """The fault of each key that was not deleted; the status of the answer says nothing of them."""
    failed = {row.get("Key"): row for row in answer.get("Errors", ())}
    return [
        fault_of_answer(200, str(failed[key].get("Code", "")), str(failed[key].get("Message", "")))
        if key in failed
        else None
        for key in keys
    ]


def lifecycle_rules(
    present: Sequence[Mapping[str, Any]], prefix: str, days: int | None
) -> list[Mapping[str, Any]]:
    """The rules of a bucket with ours for ``prefix`` set, changed or (``None``) taken out."""
    name = (_EXPIRY_RULE + prefix)[:255]
    rules = [rule for rule in present if rule.get("ID") != name]
    if days is not None:
        rules.append(
            {"ID": name, "Filter": {"Prefix": prefix}, "Status": "Enabled", "Expiration": {"Days": days}}
        )
    return rules
