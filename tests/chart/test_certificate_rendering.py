"""Certificates as the chart renders them: generated, by cert-manager, and by its CSI driver."""

from __future__ import annotations

import pytest
from tests.chart.manifests import AGENT, OPERATOR, Render, container, pod


def test_certificates_of_two_namespaces_need_an_issuer_for_both(render: Render) -> None:
    apart = {"agent": {"namespaceOverride": "gpu-agents"}}
    with pytest.raises(RuntimeError, match=r"issuerRef: with agent\.namespaceOverride name a ClusterIssuer"):
        render({**apart, "tls": {"mode": "certManager"}})
    issuer = {"name": "corporate", "kind": "ClusterIssuer"}
    reserved = {"issuerRef": issuer, "allowClusterIssuer": True}
    objects = render({**apart, "tls": {"mode": "certManager", "certManager": reserved}})
    assert {name for kind, name in objects if kind == "Certificate"} == {
        "perseus-operator-tls",
        "gpu-agents/perseus-agent-tls",
    }


def test_generated_certificates_have_one_authority_and_the_right_names(render: Render) -> None:
    from base64 import b64decode

    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    objects = render()
    secrets = {name: objects["Secret", f"perseus-{name}-tls"]["data"] for name in ("operator", "agent")}
    authority = x509.load_pem_x509_certificate(b64decode(secrets["operator"]["ca.crt"]))
    for name, data in secrets.items():
        assert data["ca.crt"] == secrets["operator"]["ca.crt"]
        assert set(data) == {"ca.crt", "tls.crt", "tls.key"}, "the authority's key is not stored"
        certificate = x509.load_pem_x509_certificate(b64decode(data["tls.crt"]))
        certificate.verify_directly_issued_by(authority)
        assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days <= 366, "months, not years"
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [f"perseus-{name}"]
        usages = set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        assert usages >= {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}


def test_certificates_by_cert_manager(render: Render) -> None:
    own = render({"tls": {"mode": "certManager"}})
    assert {name for kind, name in own if kind == "Issuer"} == {"perseus-bootstrap", "perseus-ca"}
    assert not {name for kind, name in own if kind == "Secret"}
    agent = own["Certificate", "perseus-agent-tls"]["spec"]
    assert agent["dnsNames"] == ["perseus-agent"]
    assert agent["usages"] == ["server auth", "client auth"]
    assert agent["issuerRef"]["name"] == "perseus-ca"
    issuer = {"name": "corporate", "kind": "Issuer"}
    objects = render({"tls": {"mode": "certManager", "certManager": {"issuerRef": issuer}}})
    assert not {name for kind, name in objects if kind == "Issuer"}
    assert objects["Certificate", "perseus-operator-tls"]["spec"]["issuerRef"] == issuer


@pytest.mark.parametrize("issuer", [{}, {"name": "corporate"}, {"name": "corporate", "kind": "A", "group": "b.c"}])
def test_each_agent_has_a_key_of_its_own_by_the_csi_driver(render: Render, issuer: dict[str, str]) -> None:
    values = {"tls": {"mode": "certManager", "certManager": {"csiDriver": True, "issuerRef": issuer}}}
    objects = render(values)
    assert ("Certificate", "perseus-agent-tls") not in objects
    assert ("Certificate", "perseus-operator-tls") in objects
    [volume] = [volume for volume in pod(objects, AGENT)["volumes"] if volume["name"] == "tls"]
    assert volume.keys() == {"name", "csi"}
    given = {key.rpartition("/")[2]: value for key, value in volume["csi"]["volumeAttributes"].items()}
    assert given["dns-names"] == "perseus-agent"
    assert set(given["key-usages"].split(",")) == {"server auth", "client auth"}, "an agent refuses without it"
    wanted = {"name": "perseus-ca", "kind": "Issuer", "group": "cert-manager.io", **issuer}
    assert {key: given[f"issuer-{key}"] for key in wanted} == wanted
    values["tls"]["mode"] = "generated"
    [shared] = [volume for volume in pod(render(values), AGENT)["volumes"] if volume["name"] == "tls"]
    assert "secret" in shared


SIGNER = "pki.example.com/perseus"
OF_PODS = {"mode": "podCertificate", "podCertificate": {"signerName": SIGNER}}


def test_the_kubelet_has_a_signer_make_a_certificate_for_each_pod(render: Render) -> None:
    objects = render({"tls": OF_PODS})
    assert not {name for kind, name in objects if kind in ("Secret", "Certificate", "Issuer")}
    for key, mode in ((OPERATOR, 0o440), (AGENT, 0o400)):
        [volume] = [volume for volume in pod(objects, key)["volumes"] if volume["name"] == "tls"]
        assert volume.keys() == {"name", "projected"}
        assert volume["projected"]["defaultMode"] == mode
        certificate, authority = volume["projected"]["sources"]
        assert certificate == {
            "podCertificate": {
                "signerName": SIGNER,
                "keyType": "ECDSAP256",
                "maxExpirationSeconds": 86400,
                "keyPath": "tls.key",
                "certificateChainPath": "tls.crt",
            }
        }
        assert authority == {"clusterTrustBundle": {"signerName": SIGNER, "labelSelector": {}, "path": "ca.crt"}}
        arguments = container(objects, key)["args"]
        files = {one.partition("/etc/perseus/tls/")[2] for one in arguments if "/etc/perseus/tls/" in one}
        assert files == {"tls.key", "tls.crt", "ca.crt"}, "as it is projected"


def test_a_signer_is_named_and_told_what_it_wants_and_its_authority_may_be_a_config_map(render: Render) -> None:
    with pytest.raises(RuntimeError, match=r"tls\.podCertificate\.signerName: name the signer"):
        render({"tls": {"mode": "podCertificate"}})
    with pytest.raises(RuntimeError, match="keyType"):
        render({"tls": OF_PODS | {"podCertificate": {"signerName": SIGNER, "keyType": "DSA"}}})
    own = {
        "signerName": SIGNER,
        "authorityConfigMap": "pki",
        "keyType": "ED25519",
        "maxExpirationSeconds": 3600,
        "userAnnotations": {"pki.example.com/profile": "mutual"},
    }
    [volume] = [
        volume
        for volume in pod(render({"tls": OF_PODS | {"podCertificate": own}}), AGENT)["volumes"]
        if volume["name"] == "tls"
    ]
    certificate, authority = volume["projected"]["sources"]
    assert certificate["podCertificate"]["userAnnotations"] == own["userAnnotations"]
    assert certificate["podCertificate"]["maxExpirationSeconds"] == 3600
    assert authority == {"configMap": {"name": "pki", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}


def test_beside_pod_certificates_services_have_certificates_of_ones_own(render: Render) -> None:
    with pytest.raises(RuntimeError, match=r"tls\.secret\.solver: name the Secret, since tls\.mode is podCertificate"):
        render({"tls": OF_PODS, "solver": {"enabled": True}})
    with pytest.raises(RuntimeError, match=r"webhook\.caBundle: .* since tls\.mode is podCertificate"):
        render({"tls": OF_PODS | {"secret": {"webhook": "w"}}, "webhook": {"enabled": True}})
    secrets = {"webhook": "w", "solver": "s", "web": "p", "scaler": "k"}
    enabled = {name: {"enabled": True} for name in secrets}
    enabled["webhook"]["caBundle"] = "PEM"
    objects = render({"tls": OF_PODS | {"secret": secrets}, **enabled})
    volumes = {volume["name"]: volume for volume in pod(objects, OPERATOR)["volumes"]}
    assert {name: volumes[name]["secret"]["secretName"] for name in secrets} == secrets
    worker = {volume["name"]: volume for volume in pod(objects, ("Deployment", "perseus-solver"))["volumes"]}
    [authority] = worker["operator"]["projected"]["sources"]
    assert authority.keys() == {"clusterTrustBundle"}, "what signs the operator's certificate, and no key"


def test_an_issuer_that_signs_for_every_namespace_must_be_accepted(render: Render) -> None:
    issuer = {"name": "corporate", "kind": "ClusterIssuer"}
    with pytest.raises(RuntimeError, match="for everyone who may create Certificates anywhere"):
        render({"tls": {"mode": "certManager", "certManager": {"issuerRef": issuer}}})
    accepted = {"issuerRef": issuer, "allowClusterIssuer": True}
    objects = render({"tls": {"mode": "certManager", "certManager": accepted}})
    assert objects["Certificate", "perseus-operator-tls"]["spec"]["issuerRef"] == issuer
